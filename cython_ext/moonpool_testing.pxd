# SPDX-License-Identifier: Apache-2.0
"""Declarations of moonpool/testing.h, and nothing else. The header carries the documentation."""

from libc.stdint cimport int32_t, uint32_t, uint64_t

from moonpool_engine cimport mp_config, mp_engine, mp_error, mp_status

cdef extern from "moonpool/testing.h" nogil:
    ctypedef struct mp_faults:
        uint32_t abi_version
        uint64_t seed
        double delay
        uint32_t delay_min_us
        uint32_t delay_max_us
        double drop
        double error
        int32_t error_status
        double partial
        double partial_share
        int32_t partial_status
        double corrupt

    ctypedef struct mp_faults_made:
        uint64_t delayed
        uint64_t dropped
        uint64_t failed
        uint64_t partial
        uint64_t corrupted

    void mp_faults_init(mp_faults *faults)
    mp_status mp_testing_open(
        const mp_config *config, const mp_faults *faults, mp_engine **engine, mp_error *error)
    mp_status mp_testing_set_faults(mp_engine *engine, const mp_faults *faults, mp_error *error)
    mp_status mp_testing_faults_made(mp_engine *engine, mp_faults_made *made, mp_error *error)
