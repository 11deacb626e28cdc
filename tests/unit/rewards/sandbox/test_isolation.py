"""What model-written programs tried on the trainer and its machine, tried again at both levels of isolation."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest

from mega_rl.rewards.functions import code
from mega_rl.rewards.sandbox.sandbox import NotIsolatedError, ProgramLimits, run_program
from tests.launching.enclosure import AS_ANOTHER, needs_enclosure, run_enclosed

pytestmark = pytest.mark.slow  # as a module

REPO = Path(__file__).parents[4]
# Every exploit prints THROUGH if it gets what it wants, or ends the trainer. TRAINER is the trainer's process number.
EXPLOITS = {
    "kills the trainer": "os.kill(TRAINER, 9)",
    "kills its parent": "os.kill(os.getppid(), 9)",
    "stops the trainer": "os.kill(TRAINER, 19); through()",
    "attaches to the trainer": "if libc.ptrace(16, TRAINER, 0, 0) == 0: through()",
    "opens the trainer's memory": "open('/proc/TRAINER/mem', 'rb'); through()",
    "reads the trainer's environment": """
for name in filter(str.isdigit, os.listdir('/proc')):
    try:
        if b'the-secret-of-the-trainer' in open(f'/proc/{name}/environ', 'rb').read(): through()
    except OSError: pass
""",
    "has the trainer's environment": "if 'API_KEY' in os.environ: through()",
    "reads the training answers": "if 'answer' in open(ANSWERS).read(): through()",
    "reads the passwords": "open('/etc/shadow').read(1); through()",
    "reads the source of the run": "open('REPO/mega_rl/rewards/sandbox/sandbox.py').read(); through()",
    "writes into the run": "open(ANSWERS, 'a').write('x'); through()",
    "connects to the trainer": "s = socket.socket(socket.AF_UNIX); s.connect('\\0trainer'); through()",
    "mounts": "if libc.mount(b'tmpfs', b'/tmp', b'tmpfs', 0, None) == 0: through()",
    "sets the host name": "if libc.sethostname(b'owned', 5) == 0: through()",
    "opens a setting of the system": "open('/proc/sys/kernel/hostname', 'w'); through()",
    "has capabilities": """
lines = dict(line.split(':', 1) for line in open('/proc/self/status'))
if any(int(lines['Cap' + kind], 16) for kind in ('Inh', 'Prm', 'Eff', 'Amb')): through()
""",
    "may get capabilities": """
lines = dict(line.split(':', 1) for line in open('/proc/self/status'))
if int(lines['CapBnd'], 16): through()
""",
    "is root": "if 0 in os.getresuid() + os.getresgid(): through()",
    "makes namespaces": "if libc.unshare(0x10000000) == 0: through()",
    "fills the temporary directory": """
for number in range(8): open(f'{TEMPORARY}/{number}', 'wb').write(bytes(1 << 24))
through()
""",
    "changes a device": "os.chmod('/dev/null', 0o666); through()",
    "changes the interpreter": "os.chmod('/proc/self/exe', 0o755); through()",
    "sees other processes": "if len([n for n in os.listdir('/proc') if n.isdigit()]) > 1: through()",
}
# Without namespaces the program is a process of the trainer's user; docs/rewards.md says so.
STOPPED_BY_LIMITS = {
    "has the trainer's environment",
    "mounts",
    "sets the host name",
    "has capabilities",
    "is root",
    "kills its parent",
}
NOT_STOPPED_BY_LIMITS = {
    "kills the trainer",
    "stops the trainer",
    "reads the trainer's environment",
    "reads the training answers",
    "reads the source of the run",
    "writes into the run",
    "connects to the trainer",
    "fills the temporary directory",
    "sees other processes",
}
ANSWERS = str(Path("/tmp", "run", "answers"))  # of the place where all of this happens
PRELUDE = f"""
import ctypes, os, socket
ANSWERS, TEMPORARY = {ANSWERS!r}, '/tmp'
libc = ctypes.CDLL(None, use_errno=True)
def through(): print('THROUGH', flush=True)
"""
# Runs each exploit below a process of its own, which stands for the trainer.
TRAINER = """
import json, os, socket, sys
from mega_rl.rewards.sandbox.sandbox import ProgramLimits, run_program
programs, namespaces = json.loads(sys.argv[1]), sys.argv[2] == "namespaces"
answers = sys.argv[3]
os.mkdir(os.path.dirname(answers))
listener = socket.socket(socket.AF_UNIX)
listener.bind("\\0trainer")
listener.listen()
through = []
for name, program in programs.items():
    with open(answers, "w") as file:
        file.write("the answer")
    trainer = os.fork()
    if trainer == 0:
        program = program.replace("TRAINER", str(os.getpid()))
        run = run_program(program, "", ProgramLimits(20.0, 1 << 29, namespaces=namespaces))
        os._exit(17 if "THROUGH" in run.output else 0)
    status = os.waitpid(trainer, os.WUNTRACED)[1]
    if os.WIFSTOPPED(status):
        os.kill(trainer, 9)
        os.waitpid(trainer, 0)
    if status != 0 or open(answers).read() != "the answer":
        through.append(name)
print(json.dumps(through))
"""


def exploit(level: str) -> set[str]:
    programs = {name: PRELUDE + text.replace("REPO", str(REPO)) for name, text in EXPLOITS.items()}
    ended = run_enclosed(TRAINER, json.dumps(programs), level, ANSWERS, is_root=level == "namespaces")
    assert ended.returncode == 0, ended.stderr
    return set(json.loads(ended.stdout))


@needs_enclosure()
def test_nothing_gets_through_namespaces() -> None:
    assert exploit("namespaces") == set()


@needs_enclosure()
def test_what_limits_stop_and_what_they_do_not() -> None:
    through = exploit("limits")
    assert through & STOPPED_BY_LIMITS == set()
    assert through >= NOT_STOPPED_BY_LIMITS


@needs_enclosure()
@pytest.mark.parametrize("is_root", [True, False])
def test_every_namespace_is_the_programs_own(is_root: bool) -> None:
    program = """
import json, os
from mega_rl.rewards.sandbox.sandbox import ProgramLimits, run_program
names = ("user", "mnt", "pid", "net", "ipc", "uts")
listing = f"import os; print(*(os.readlink('/proc/self/ns/' + name) for name in {names}))"
inside = run_program(listing, "", ProgramLimits(20.0, 1 << 29)).output.split()
print(set(inside) & {os.readlink("/proc/self/ns/" + name) for name in names}, len(inside))
"""
    ended = run_enclosed(program, is_root=is_root)
    assert ended.stdout == "set() 6\n", ended.stderr


@needs_enclosure()
def test_a_program_finds_what_it_needs() -> None:
    listed = "import multiprocessing, os, tempfile, zoneinfo, numpy, pwd\n"
    program = f"""
from mega_rl.rewards.sandbox.sandbox import ProgramLimits, run_program
source = {listed!r} + '''
open('x', 'w').write('1'); tempfile.TemporaryFile(); multiprocessing.Lock()
print(os.getcwd(), pwd.getpwuid(os.getuid()).pw_name, len(os.urandom(8)), open(os.devnull, 'w').write('x'))
'''
print(run_program(source, "", ProgramLimits(20.0, 1 << 30)).output, end="")
"""
    ended = run_enclosed(program)
    assert ended.stdout == "/tmp nobody 8 1\n", ended.stderr


@needs_enclosure()
def test_what_is_mounted_deeper_is_read_only_too() -> None:
    program = """
import subprocess
from mega_rl.rewards.sandbox.sandbox import ProgramLimits, run_program
subprocess.run(("mount", "-t", "tmpfs", "tmpfs", "/usr/local/share"), check=True)
with open("/usr/local/share/there", "w") as file:
    file.write("there")
source = "print(open('/usr/local/share/there').read())\\nopen('/usr/local/share/there', 'w')\\nprint('written')"
print(run_program(source, "", ProgramLimits(20.0, 1 << 29)))
"""
    ended = run_enclosed(program)
    assert ended.stdout == "ProgramRun(exit_code=1, output='there\\n')\n", ended.stderr


@needs_enclosure()
def test_a_container_that_masks_its_processes_leaves_the_program_none() -> None:
    program = """
import subprocess
from mega_rl.rewards.sandbox.sandbox import ProgramLimits, run_program
subprocess.run(("mount", "-t", "tmpfs", "-o", "ro", "tmpfs", "/proc/fs"), check=True)
subprocess.run(("mount", "-o", "bind,ro", "/proc/sys", "/proc/sys"), check=True)
print(run_program("import os; print(os.listdir('/proc'))", "", ProgramLimits(20.0, 1 << 29)))
"""
    ended = run_enclosed(program)
    assert ended.stdout == "ProgramRun(exit_code=0, output='[]\\n')\n", ended.stderr


def test_limits_are_refused_to_root_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    with pytest.raises(
        ValueError, match=r"isolation is limits and the run is root's.*; set it to namespaces, or run as"
    ):
        code._check_code_tests(isolation="limits")
    with pytest.raises(NotIsolatedError, match="not run as root without namespaces"):
        run_program("", "", ProgramLimits(20.0, 1 << 29, namespaces=False))


@needs_enclosure()
@pytest.mark.parametrize(
    ("is_root", "way"), [(True, "or run as another user than root and set isolation"), (False, "or set isolation")]
)
def test_a_system_without_namespaces_is_told_in_one_sentence(is_root: bool, way: str) -> None:
    # The limit is one of the enclosing namespace.
    program = """
import os, sys
from mega_rl.rewards.functions import code
try:
    code._check_code_tests()
except ValueError as error:
    print(error)
"""
    if is_root:
        program = "open('/proc/sys/user/max_user_namespaces', 'w').write('0')\n" + program
        ended = run_enclosed(program)
    else:
        command = ("python", "-c", AS_ANOTHER, sys.executable, "-c", program)
        closed = "import os, sys\nopen('/proc/sys/user/max_user_namespaces', 'w').write('1')\n"
        ended = run_enclosed(f"{closed}os.execv(sys.executable, {command!r})")
    sentence = (
        r"this system allows no unprivileged namespaces \(unshare: No space left on device\), so programs cannot be "
        rf"cut off from files, network and the trainer; allow them, {way} to limits\n"
    )
    assert re.fullmatch(sentence, ended.stdout), (ended.stdout, ended.stderr)


# Cuts off whatever the trainer may have mapped: the progress file of its temporary directory, and every open file.
TRUNCATE = """
import os, tempfile
def cut(folder):
    for place in (folder, os.path.dirname(folder), '..'):
        try:
            for name in os.listdir(place):
                try: os.truncate(os.path.join(place, name), 0)
                except OSError: pass
        except OSError: pass
    for number in range(3, 64):
        try: os.ftruncate(number, 0)
        except OSError: pass
"""
REWARD = (
    TRUNCATE
    + """
def truncate(data_source, solution_str, ground_truth, extra_info):
    if solution_str == 'cut': cut(tempfile.gettempdir())
    return float(len(solution_str))
"""
)
SCORING = """
import os, sys, tempfile
from mega_rl.config.schema.sections import RewardConfig, RewardWorkersConfig
from mega_rl.rewards.scorer import build_scorer
from tests.unit.rewards.pool.test_pool import trajectory
with open(os.path.join(tempfile.gettempdir(), 'mine.py'), 'w') as file:
    file.write(sys.argv[1])
name, isolation, text = sys.argv[2:]
options = dict(isolation=isolation, timeout_s=20.0) if name == 'code_tests' else {}
scorer = build_scorer([RewardConfig(name, options=options)], RewardWorkersConfig(num_workers=1))
for _ in range(2):
    print([score.value for score in scorer.score([trajectory(text, truth='{"inputs": [""], "outputs": ["1"]}')])])
"""


@needs_enclosure()
@pytest.mark.parametrize(
    ("name", "isolation", "text"),
    [
        ("/tmp" + "/mine.py:truncate", "namespaces", "cut"),
        ("code_tests", "namespaces", f"```python\n{TRUNCATE}\ncut(os.environ['TMPDIR'])\nprint(1)\n```"),
        ("code_tests", "limits", f"```python\n{TRUNCATE}\ncut(os.environ['TMPDIR'])\nprint(1)\n```"),
    ],
)
def test_the_trainer_maps_nothing_that_can_be_cut_off(name: str, isolation: str, text: str) -> None:
    ended = run_enclosed(SCORING, REWARD, name, isolation, text, is_root=isolation == "namespaces")
    value = 3.0 if name.endswith("truncate") else 1.0
    assert (ended.returncode, ended.stdout) == (0, f"[{value}]\n" * 2), ended.stderr
