/* SPDX-License-Identifier: Apache-2.0
 *
 * moonpool/testing.h - engines that misbehave on purpose, for tests.
 *
 * Such an engine does what moonpool/engine.h says, but its transports lose, delay, refuse and spoil some of the
 * transfers that it submits. Whatever they do, the contract of a transfer holds: it ends in one state with a status per
 * item, its buffers are its own until it is settled, and no notification is delivered when bytes did not arrive.
 */
#ifndef MOONPOOL_TESTING_H
#define MOONPOOL_TESTING_H

#include "moonpool/engine.h"

#ifdef __cplusplus
extern "C" {
#endif

/* What happens to transfers. Probabilities are 0 to 1, of each transfer. Every draw comes from one sequence of random
 * numbers: which transfers meet a fault depends on the order in which they are submitted and on the other faults too,
 * so a changed rule can change what the same seed does with all of them. */
typedef struct mp_faults {
  uint32_t abi_version; /* MP_ABI_VERSION */
  uint64_t seed;        /* of every choice */
  double delay;         /* submitted so much later */
  uint32_t delay_min_us, delay_max_us;
  double drop;          /* never answered: it ends by its deadline, a cancel or a close */
  double error;         /* fails as a whole, and nothing of it is moved */
  int32_t error_status; /* mp_status that it fails with */
  double partial; /* some of its descriptors (what adjacent items merge into, a large item is cut into) fail ... */
  double partial_share;   /* ... each with this probability, one at least; the others are moved */
  int32_t partial_status; /* mp_status that they fail with */
  /* One bit of the bytes that arrive is wrong. With a digest the item fails with MP_DIGEST, without one nobody is told.
   */
  double corrupt;
} mp_faults;

/* How many transfers met each fault. */
typedef struct mp_faults_made {
  uint64_t delayed, dropped, failed, partial, corrupted;
} mp_faults_made;

/* Fills every field with its default: no fault; MP_PEER_LOST and MP_REGION_UNKNOWN; half of the descriptors; 1 ms to
 * 10 ms. */
MP_API void mp_faults_init(mp_faults *faults);
/* As mp_engine_open. */
MP_API mp_status mp_testing_open(const mp_config *config, const mp_faults *faults, mp_engine **engine, mp_error *error);
/* From here on; begins anew with the seed. MP_INVALID_ARGUMENT for an engine that mp_testing_open did not make. */
MP_API mp_status mp_testing_set_faults(mp_engine *engine, const mp_faults *faults, mp_error *error);
/* Since the engine was opened. */
MP_API mp_status mp_testing_faults_made(mp_engine *engine, mp_faults_made *made, mp_error *error);

#ifdef __cplusplus
}
#endif
#endif /* MOONPOOL_TESTING_H */
