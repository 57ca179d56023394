// SPDX-License-Identifier: GPL-2.0-only
/*
 * A bit of the kernel's code or constants that flips, and a function that then computes wrong sums.
 */
#include <linux/linkage.h>
#include <linux/mm.h>
#include <linux/vmalloc.h>

#include "mercury_test.h"

/* Returns 31 a + b. The factor is the fourth byte. */
u64 test_step(u64 a, u64 b);
asm(".pushsection .text\n"
    ".globl test_step\n"
    ".type test_step, @function\n"
    "test_step:\n"
    "	imulq $31, %rdi, %rax\n"
    "	addq %rsi, %rax\n"
    "	" ASM_RET
    ".size test_step, . - test_step\n"
    ".popsection\n");

/* A constant that the sum begins with. */
extern const volatile u64 test_seed;
asm(".pushsection .rodata, \"a\"\n"
    ".balign 8\n"
    ".globl test_seed\n"
    ".type test_seed, @object\n"
    "test_seed:\n"
    "	.quad 0x6d6572637572791f\n"
    ".size test_seed, 8\n"
    ".popsection\n");

/* sum COUNT: computes a sum */
int test_sum(struct test_answer *answer, const u64 *arguments)
{
	u64 sum = test_seed, i;

	for (i = 0; i < arguments[0]; i++)
		sum = test_step(sum, i);
	test_say(answer, "sum %llu\n", sum);
	return 0;
}

/* flip ADDRESS BIT: flips a bit of the kernel or of a module, round its page tables */
int test_flip(struct test_answer *answer, const u64 *arguments)
{
	void *address = (void *)(unsigned long)arguments[0];
	struct page *page;
	u8 *alias;

	if (arguments[0] < __START_KERNEL_map || arguments[0] >= MODULES_END || arguments[1] > 7)
		return -EINVAL;
	page = arguments[0] >= MODULES_VADDR ? vmalloc_to_page(address) : virt_to_page(address);
	alias = page ? vmap(&page, 1, VM_MAP, PAGE_KERNEL) : NULL;
	if (!alias)
		return -ENOMEM;
	alias[offset_in_page(address)] ^= 1 << arguments[1];
	test_say(answer, "byte %#x\n", alias[offset_in_page(address)]);
	vunmap(alias);
	return 0;
}
