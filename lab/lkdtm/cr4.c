// SPDX-License-Identifier: GPL-2.0-only
/*
 * LKDTM's crash type UNSET_SMEP writes CR4 by a function of the kernel that modules cannot call. This one
 * takes its place, and pins no bits.
 */
void lkdtm_write_cr4(unsigned long value);

void lkdtm_write_cr4(unsigned long value)
{
	asm volatile("mov %0, %%cr4" : : "r"(value) : "memory");
}
