# SPDX-License-Identifier: Apache-2.0
# Engines with faults: moonpool/testing.h. Included by _native.pyx.

cdef int read_faults(dict given, mp_faults *faults) except -1:
    mp_faults_init(faults)
    faults.abi_version = MP_ABI_VERSION
    faults.seed = given["seed"]
    faults.delay = given["delay"]
    faults.delay_min_us = given["delay_min_us"]
    faults.delay_max_us = given["delay_max_us"]
    faults.drop = given["drop"]
    faults.error = given["error"]
    faults.error_status = given["error_status"]
    faults.partial = given["partial"]
    faults.partial_share = given["partial_share"]
    faults.partial_status = given["partial_status"]
    faults.corrupt = given["corrupt"]
    return 0


cdef class FaultyEngine(Engine):
    """An engine of mp_testing_open."""

    cdef mp_faults faults

    def __init__(self, dict faults, **config):
        read_faults(faults, &self.faults)
        Engine.__init__(self, **config)

    cdef int open(self, const mp_config *config) except -1:
        cdef mp_error error
        cdef mp_status status
        with nogil:
            status = mp_testing_open(config, &self.faults, &self.handle, &error)
        return check(status, &error)

    def set_faults(self, dict faults):
        cdef mp_faults changed
        cdef mp_error error
        read_faults(faults, &changed)
        check(mp_testing_set_faults(self.handle, &changed, &error), &error)

    def faults_made(self):
        cdef mp_faults_made made
        cdef mp_error error
        check(mp_testing_faults_made(self.handle, &made, &error), &error)
        return made.delayed, made.dropped, made.failed, made.partial, made.corrupted
