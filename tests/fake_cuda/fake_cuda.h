/* SPDX-License-Identifier: Apache-2.0
 *
 * A stand-in for libcuda.so.1: what tests ask of it, beside the functions of the driver. No GPU is needed. Programs
 * open it by the name of the real library, or through MOONPOOL_CUDA_LIBRARY.
 *
 * Device memory cannot be touched by a CPU: its pages are PROT_NONE where programs see them, and the stand-in reaches
 * them through a mapping of its own. Streams are threads, so a copy is not done when the call returns. A stream that
 * was created blocking does not wait for the default stream: who relies on that finds out here.
 *
 * As in the driver, CU_POINTER_ATTRIBUTE_RANGE_START_ADDR and RANGE_SIZE of memory that was mapped by cuMemMap are
 * those of everything that was reserved with it, mapped or not; cuMemGetAddressRange and MAPPING_BASE_ADDR (19) with
 * MAPPING_SIZE (18) give the one mapping. Such memory has no context, no legacy IPC handle and no SYNC_MEMOPS.
 *
 * Settings come from the environment variable FAKE_CUDA, and from fakeCudaSet(). Both take NAME=VALUE, separated by
 * semicolons:
 *
 *   devices=2              before cuInit only
 *   memory=268435456       bytes of each device
 *   driver=12020           what cuDriverGetVersion says. Symbols go with `without=` of the helper in __init__.py
 *   delay_us=50            every copy and kernel takes at least this long
 *   ns_per_kib=100         and so much for each KiB
 *   fail=NAME:NTH:CODE     the NTH call of NAME from now on, counted from 1, returns CODE. With :sticky the context
 * that is current is dead afterwards. NAME `execute` is the work of streams, which is always sticky fail= forgets those
 * that were not met attribute.116=0        of every device; attribute.116@1=0 of device 1 pci=0000:41:00.0,...   PCI
 * addresses of the devices */
#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* 0, or -1: these settings make no sense. */
int fakeCudaSet(const char *settings);
/* Of this function so far, by its full symbol (cuMemAlloc_v2), failed or not. Also of what streams have done:
 * "bytes HtoD", "bytes DtoH", "bytes DtoD", "bytes HtoH", "copies", "pageable copies", "kernels". */
uint64_t fakeCudaCalls(const char *name);
/* Calls of all functions of the driver together. */
uint64_t fakeCudaAllCalls(void);
void fakeCudaForgetCalls(void);
/* How many there are: "contexts" (that are active), "primary contexts made" (ever), "streams", "events", "allocations",
 * "mappings", "handles", "reservations", "pinned" (host memory), "imports" (IPC memory that is open), "modules".
 * -1: no such kind. */
int64_t fakeCudaAlive(const char *kind);
/* What a context says from now on, as after a sticky error: the primary one of this device. */
void fakeCudaBreak(int device, int code);
/* 1: streams keep their work and do not begin with it. 0: they go on. */
void fakeCudaHold(int on);
/* Device memory as the test sees it: not counted, without a context, not in the order of any stream. 0, or -1: these
 * bytes are not all device memory. */
int fakeCudaPeek(uint64_t address, void *to, size_t nbytes);
int fakeCudaPoke(uint64_t address, const void *from, size_t nbytes);
/* Lets CPUs at these pages of device memory, or not any more: what nvidia-peermem does for verbs that register a device
 * address. ibv_reg_mr of a software device pins pages that can be read and written, so a test opens them, registers,
 * and closes them again; the registration stays valid. 0, or -1 as above. */
int fakeCudaOpen(uint64_t address, size_t nbytes, int on);
/* The bytes that a dma-buf of cuMemGetHandleForAddressRange has, as a stand-in for verbs reaches them. 0, or -1: it is
 * none. The descriptor's file position is where its bytes begin in a memfd, for another process. */
int fakeCudaDmabuf(int fd, void **data, size_t *nbytes);

#ifdef __cplusplus
}
#endif
