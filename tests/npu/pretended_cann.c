/* The part of CANN's runtime that torch_npu needs to believe in devices, on a host that has none.
 *
 * NPU_STUB_DEVICES pretended devices (0 or unset: none) keep their memory on the host. Allocation, copies, streams and
 * events work, in program order; there are no kernels and no communication. tests/npu/stubs.py compiles this file
 * together with one failing function for every other name that the installed wheel asks for.
 * Signatures and error numbers are those of the AscendCL interface description.
 */
#define _GNU_SOURCE
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

enum { DONE = 0, NO_CONTEXT = 107002, NO_DEVICE = 107001, NO_MEMORY = 207001, NOT_THERE = 500000 };
enum { MAX_DEVICES = 64, ALIGNMENT = 512 };

static size_t used_bytes[MAX_DEVICES];
static __thread int bound_device = -1;

static int num_devices(void) {
    const char *text = getenv("NPU_STUB_DEVICES");
    int number = text ? atoi(text) : 0;
    return number < MAX_DEVICES ? number : MAX_DEVICES;
}

static size_t device_bytes(void) {
    const char *text = getenv("NPU_STUB_DEVICE_BYTES");
    return text ? strtoull(text, NULL, 10) : (size_t)64 << 30;
}

/* What a function without an implementation answers; NPU_STUB_TRACE=1 says which ones were called. */
int pretended_cann_missing(const char *name) {
    if (getenv("NPU_STUB_TRACE")) fprintf(stderr, "[pretended CANN] not there: %s\n", name);
    return NOT_THERE;
}

static int if_any_device(void) { return num_devices() ? DONE : NO_DEVICE; }

/* process and device */
int aclInit(const char *config) { (void)config; return if_any_device(); }
int aclFinalize(void) { return DONE; }
int aclrtGetDeviceCount(uint32_t *count) { *count = (uint32_t)num_devices(); return DONE; }
int aclrtSetDevice(int32_t device) {
    if (device < 0 || device >= num_devices()) return NO_DEVICE;
    bound_device = device;
    return DONE;
}
int aclrtGetDevice(int32_t *device) {
    if (bound_device < 0) return NO_CONTEXT;
    *device = bound_device;
    return DONE;
}
int aclrtResetDevice(int32_t device) { (void)device; bound_device = -1; return DONE; }
int aclrtGetCurrentContext(void **context) {
    if (bound_device < 0) return NO_CONTEXT;
    *context = (void *)(intptr_t)(bound_device + 1);
    return DONE;
}
int aclrtSetCurrentContext(void *context) { bound_device = (int)(intptr_t)context - 1; return DONE; }
int aclrtSynchronizeDevice(void) { return if_any_device(); }
int aclrtSynchronizeDeviceWithTimeout(int32_t timeout) { (void)timeout; return if_any_device(); }
int aclrtDeviceCanAccessPeer(int32_t *can, int32_t a, int32_t b) { (void)a; (void)b; *can = 1; return DONE; }
int aclrtDeviceEnablePeerAccess(int32_t peer, uint32_t flags) { (void)peer; (void)flags; return if_any_device(); }
int aclrtDeviceGetBareTgid(int32_t *process) { *process = (int32_t)getpid(); return DONE; }
const char *aclrtGetSocName(void) { const char *name = getenv("NPU_STUB_SOC"); return name ? name : "Ascend910B2"; }
const char *aclGetRecentErrMsg(void) { return "this device is pretended: it has no such kernel"; }
int aclGetDeviceCapability(uint32_t device, int32_t kind, int64_t *value) { (void)device; (void)kind; *value = 24; return DONE; }

/* memory: a block is preceded by what its release must know */
struct block { size_t bytes; int device; void *base; };

static int take(void **out, size_t bytes) {
    int device = bound_device < 0 ? 0 : bound_device;
    void *base;
    if (!num_devices()) return NO_DEVICE;
    if (used_bytes[device] + bytes > device_bytes()) return NO_MEMORY;
    if (posix_memalign(&base, ALIGNMENT, bytes + ALIGNMENT)) return NO_MEMORY;
    struct block *block = base;
    *block = (struct block){bytes, device, base};
    __sync_fetch_and_add(&used_bytes[device], bytes);
    *out = (char *)base + ALIGNMENT;
    return DONE;
}
int aclrtMalloc(void **out, size_t bytes, int32_t policy) { (void)policy; return take(out, bytes); }
int aclrtMallocAlign32(void **out, size_t bytes, int32_t policy) { (void)policy; return take(out, bytes); }
int aclrtFree(void *pointer) {
    if (!pointer) return DONE;
    struct block *block = (void *)((char *)pointer - ALIGNMENT);
    __sync_fetch_and_sub(&used_bytes[block->device], block->bytes);
    free(block->base);
    return DONE;
}
int aclrtMallocHost(void **out, size_t bytes) { return posix_memalign(out, ALIGNMENT, bytes ? bytes : ALIGNMENT) ? NO_MEMORY : DONE; }
int aclrtFreeHost(void *pointer) { free(pointer); return DONE; }
int aclrtGetMemInfo(int32_t kind, size_t *free_bytes, size_t *total_bytes) {
    (void)kind;
    *total_bytes = device_bytes();
    *free_bytes = *total_bytes - used_bytes[bound_device < 0 ? 0 : bound_device];
    return if_any_device();
}
int aclrtMemcpy(void *to, size_t room, const void *from, size_t bytes, int32_t kind) {
    (void)room; (void)kind;
    memcpy(to, from, bytes);
    return DONE;
}
int aclrtMemcpyAsync(void *to, size_t room, const void *from, size_t bytes, int32_t kind, void *stream) {
    (void)stream;
    return aclrtMemcpy(to, room, from, bytes, kind);
}
int aclrtMemset(void *to, size_t room, int32_t value, size_t bytes) { (void)room; memset(to, value, bytes); return DONE; }
int aclrtMemsetAsync(void *to, size_t room, int32_t value, size_t bytes, void *stream) {
    (void)stream;
    return aclrtMemset(to, room, value, bytes);
}

/* virtual memory, for expandable segments: an address range without access gets it as pages are mapped */
int aclrtReserveMemAddress(void **out, size_t bytes, size_t alignment, void *expected, uint64_t flags) {
    (void)alignment; (void)expected; (void)flags;
    if (!num_devices()) return NO_DEVICE;
    *out = mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return *out == MAP_FAILED ? NO_MEMORY : DONE;
}
int aclrtReleaseMemAddress(void *pointer) { (void)pointer; return DONE; } /* its length is not said: stays reserved */
int aclrtMallocPhysical(void **handle, size_t bytes, const void *property, uint64_t flags) {
    (void)property; (void)flags;
    int device = bound_device < 0 ? 0 : bound_device;
    if (!num_devices()) return NO_DEVICE;
    if (used_bytes[device] + bytes > device_bytes()) return NO_MEMORY;
    struct block *block = malloc(sizeof *block);
    *block = (struct block){bytes, device, NULL};
    __sync_fetch_and_add(&used_bytes[device], bytes);
    *handle = block;
    return DONE;
}
int aclrtFreePhysical(void *handle) {
    struct block *block = handle;
    if (block->base) mmap(block->base, block->bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    __sync_fetch_and_sub(&used_bytes[block->device], block->bytes);
    free(block);
    return DONE;
}
int aclrtMapMem(void *pointer, size_t bytes, size_t offset, void *handle, uint64_t flags) {
    (void)offset; (void)flags;
    ((struct block *)handle)->base = pointer;
    return mprotect(pointer, bytes, PROT_READ | PROT_WRITE) ? NO_MEMORY : DONE;
}
int aclrtUnmapMem(void *pointer) { (void)pointer; return DONE; } /* the pages go with the handle */

/* streams and events: everything is done when it is asked for */
static int new_object(void **out) { *out = calloc(1, 64); return if_any_device(); }
int aclrtCreateStream(void **stream) { return new_object(stream); }
int aclrtCreateStreamWithConfig(void **stream, uint32_t priority, uint32_t flags) { (void)priority; (void)flags; return new_object(stream); }
int aclrtDestroyStream(void *stream) { free(stream); return DONE; }
int aclrtDestroyStreamForce(void *stream) { free(stream); return DONE; }
int aclrtSynchronizeStream(void *stream) { (void)stream; return if_any_device(); }
int aclrtSynchronizeStreamWithTimeout(void *stream, int32_t timeout) { (void)stream; (void)timeout; return if_any_device(); }
int aclrtStreamQuery(void *stream, int32_t *status) { (void)stream; *status = 0; return if_any_device(); } /* complete */
int aclrtStreamWaitEvent(void *stream, void *event) { (void)stream; (void)event; return if_any_device(); }
int aclrtSetStreamFailureMode(void *stream, uint64_t mode) { (void)stream; (void)mode; return DONE; }
int aclrtCreateEventExWithFlag(void **event, uint32_t flags) { (void)flags; return new_object(event); }
int aclrtCreateEventWithFlag(void **event, uint32_t flags) { (void)flags; return new_object(event); }
int aclrtDestroyEvent(void *event) { free(event); return DONE; }
int aclrtRecordEvent(void *event, void *stream) {
    (void)stream;
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    *(double *)event = now.tv_sec * 1e3 + now.tv_nsec / 1e6; /* milliseconds */
    return DONE;
}
int aclrtResetEvent(void *event, void *stream) { (void)event; (void)stream; return DONE; }
int aclrtSynchronizeEvent(void *event) { (void)event; return DONE; }
int aclrtQueryEventStatus(void *event, int32_t *status) { (void)event; *status = 1; return DONE; } /* recorded */
int aclrtEventElapsedTime(float *milliseconds, void *begin, void *end) {
    *milliseconds = (float)(*(double *)end - *(double *)begin);
    return DONE;
}

/* settings that change nothing here */
int aclSetCompileopt(int32_t option, const char *value) { (void)option; (void)value; return DONE; }
int aclrtGetSysParamOpt(int32_t option, int64_t *value) { (void)option; *value = 0; return DONE; }
int aclrtSetSysParamOpt(int32_t option, int64_t value) { (void)option; (void)value; return DONE; }
int aclrtCtxSetSysParamOpt(int32_t option, int64_t value) { (void)option; (void)value; return DONE; }
int aclrtSetDeviceSatMode(int32_t mode) { (void)mode; return DONE; }
int aclrtSetOpExecuteTimeOut(uint32_t seconds) { (void)seconds; return DONE; }
int aclrtSetOpWaitTimeout(uint32_t seconds) { (void)seconds; return DONE; }
int aclrtSetOpExecuteTimeOutV2(uint64_t microseconds, uint64_t *actual) { if (actual) *actual = microseconds; return DONE; }
int aclrtPeekAtLastError(int32_t level) { (void)level; return DONE; }
int aclrtGetLastError(int32_t level) { (void)level; return DONE; }
int aclmdlInitDump(void) { return DONE; }
int aclmdlFinalizeDump(void) { return DONE; }
uint64_t MsprofSysCycleTime(void) { return 0; }
void aclAppLog(int32_t level, const char *function, const char *file, uint32_t line, const char *format, ...) {
    (void)level; (void)function; (void)file; (void)line; (void)format;
}
