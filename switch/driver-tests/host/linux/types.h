/* SPDX-License-Identifier: GPL-2.0-only */
/* The kernel's types, on the host. */
#ifndef MERCURY_HOST_TYPES_H
#define MERCURY_HOST_TYPES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef unsigned long long u64;
typedef int32_t s32;
typedef long long s64;

#define U64_MAX		UINT64_MAX

#endif
