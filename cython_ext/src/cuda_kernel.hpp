// SPDX-License-Identifier: Apache-2.0
// The kernel that copies scattered pieces, as PTX: the driver compiles it for whatever GPU is there, and nobody needs
// CUDA's compiler to build.
#pragma once

#include <cstdint>

namespace moonpool::cuda {

// What the kernel reads of a piece. Everything that the device can reach may be copied: its memory, that of its peers,
// and pinned memory of the host.
struct Piece {
  uint64_t to;
  uint64_t from;
  uint64_t nbytes;
};
static_assert(sizeof(Piece) == 24);

constexpr const char *kCopyKernel = "moonpool_copy_pieces";
// Threads of a block. Each moves four vectors of 16 bytes at a time.
constexpr unsigned kCopyThreads = 256;

// Its parameter is where the pieces are. Block (x, y) copies its share of piece x, of which the blocks with other y
// copy the rest. Pieces whose two addresses are not both multiples of 16 are copied byte by byte.
//
// ld.cs and st.cs: read and written once, so what is in the L2 cache stays there.
constexpr const char *kCopyModule = R"(
.version 6.0
.target sm_70
.address_size 64

.visible .entry moonpool_copy_pieces(.param .u64 pieces)
{
  .reg .pred %p<5>;
  .reg .b32 %r<24>;
  .reg .b64 %d<20>;

  // d2: to, d3: from, d4: bytes
  ld.param.u64 %d0, [pieces];
  cvta.to.global.u64 %d0, %d0;
  mov.u32 %r0, %ctaid.x;
  mul.wide.u32 %d1, %r0, 24;
  add.u64 %d1, %d0, %d1;
  ld.global.u64 %d2, [%d1];
  ld.global.u64 %d3, [%d1+8];
  ld.global.u64 %d4, [%d1+16];

  // d5: which thread of the piece, d6: of how many
  mov.u32 %r1, %tid.x;
  mov.u32 %r2, %ntid.x;
  mov.u32 %r3, %ctaid.y;
  mov.u32 %r4, %nctaid.y;
  mad.lo.u32 %r5, %r3, %r2, %r1;
  mul.lo.u32 %r6, %r4, %r2;
  cvt.u64.u32 %d5, %r5;
  cvt.u64.u32 %d6, %r6;

  // d8: bytes that go as vectors
  mov.u64 %d8, 0;
  or.b64 %d7, %d2, %d3;
  and.b64 %d7, %d7, 15;
  setp.ne.u64 %p0, %d7, 0;
  @%p0 bra BYTES;
  and.b64 %d8, %d4, -16;

  // d9: this thread's vector, d10: how far the next one is, d11: the fourth one
  shl.b64 %d9, %d5, 4;
  shl.b64 %d10, %d6, 4;
  mul.lo.u64 %d11, %d10, 3;

FOUR:
  add.u64 %d12, %d9, %d11;
  setp.ge.u64 %p1, %d12, %d8;
  @%p1 bra ONE;
  add.u64 %d13, %d3, %d9;
  add.u64 %d14, %d13, %d10;
  add.u64 %d15, %d14, %d10;
  add.u64 %d16, %d15, %d10;
  ld.global.cs.v4.u32 {%r8, %r9, %r10, %r11}, [%d13];
  ld.global.cs.v4.u32 {%r12, %r13, %r14, %r15}, [%d14];
  ld.global.cs.v4.u32 {%r16, %r17, %r18, %r19}, [%d15];
  ld.global.cs.v4.u32 {%r20, %r21, %r22, %r23}, [%d16];
  add.u64 %d13, %d2, %d9;
  add.u64 %d14, %d13, %d10;
  add.u64 %d15, %d14, %d10;
  add.u64 %d16, %d15, %d10;
  st.global.cs.v4.u32 [%d13], {%r8, %r9, %r10, %r11};
  st.global.cs.v4.u32 [%d14], {%r12, %r13, %r14, %r15};
  st.global.cs.v4.u32 [%d15], {%r16, %r17, %r18, %r19};
  st.global.cs.v4.u32 [%d16], {%r20, %r21, %r22, %r23};
  add.u64 %d9, %d12, %d10;
  bra FOUR;

ONE:
  setp.ge.u64 %p2, %d9, %d8;
  @%p2 bra BYTES;
  add.u64 %d13, %d3, %d9;
  ld.global.cs.v4.u32 {%r8, %r9, %r10, %r11}, [%d13];
  add.u64 %d14, %d2, %d9;
  st.global.cs.v4.u32 [%d14], {%r8, %r9, %r10, %r11};
  add.u64 %d9, %d9, %d10;
  bra ONE;

BYTES:
  add.u64 %d9, %d8, %d5;
BYTE:
  setp.ge.u64 %p3, %d9, %d4;
  @%p3 bra DONE;
  add.u64 %d13, %d3, %d9;
  ld.global.cs.u8 %r8, [%d13];
  add.u64 %d14, %d2, %d9;
  st.global.cs.u8 [%d14], %r8;
  add.u64 %d9, %d9, %d6;
  bra BYTE;

DONE:
  ret;
}
)";

}  // namespace moonpool::cuda
