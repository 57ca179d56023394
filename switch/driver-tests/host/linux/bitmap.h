/* SPDX-License-Identifier: GPL-2.0-only */
/* Bit operations of the kernel, in their simplest form. */
#ifndef MERCURY_HOST_BITMAP_H
#define MERCURY_HOST_BITMAP_H

#include <linux/types.h>

#define BITS_PER_LONG	64
#define BIT_ULL(number)	(1ULL << (number))

static inline bool test_bit(unsigned long number, const unsigned long *bits)
{
	return bits[number / BITS_PER_LONG] >> (number % BITS_PER_LONG) & 1;
}

static inline void __set_bit(unsigned long number, unsigned long *bits)
{
	bits[number / BITS_PER_LONG] |= 1UL << (number % BITS_PER_LONG);
}

static inline bool __test_and_set_bit(unsigned long number, unsigned long *bits)
{
	bool was_set = test_bit(number, bits);

	__set_bit(number, bits);
	return was_set;
}

static inline unsigned long find_next_bit(const unsigned long *bits, unsigned long size, unsigned long from)
{
	while (from < size && !test_bit(from, bits))
		from += from % BITS_PER_LONG || bits[from / BITS_PER_LONG] ? 1 : BITS_PER_LONG;
	return from;
}

#endif
