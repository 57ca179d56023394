/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * The lab's test module, which acts in the kernel where a test cannot act from outside. /dev/mercury_test
 * takes a command in words and answers in lines of a name and a value.
 *
 *	main.c		the device and its commands
 *	interrupts.c	a CPU that is held with interrupts off; NMIs
 *	hypercall.c	random hypercalls
 *	hidden.c	the hypervisor's memory, seen from the kernel
 *	map.c		physical pages for user mode
 *	state.c		MSRs, CR4, and the readable state of a CPU
 *	refuse.c	a device that refuses to be quiesced; a thread that never rests after a restore
 *	death.c		a CPU that hangs, and one that shuts down
 *	flip.c		random bits that flip
 *	pause.c		all CPUs stopped by the kernel; an HPET that falls silent
 *	send.c		a read-only page for a device
 *	queue.c		entries without pages in a virtqueue
 *	sum.c		a bit of code or constants that flips
 */
#ifndef MERCURY_TEST_H
#define MERCURY_TEST_H

#include <linux/types.h>

#include "mercury_abi.h"

#define TEST_ARGUMENTS_MAX 4

/* A command's answer. */
struct test_answer {
	size_t used;
	char text[8192];
};

/* A command, which returns 0 or a negative errno. */
typedef int (*test_command)(struct test_answer *answer, const u64 *arguments);

__printf(2, 3) void test_say(struct test_answer *answer, const char *format, ...);

/* Runs a function on a CPU, in a kernel thread of its own, with interrupts off. */
int test_on_cpu(u64 cpu, void (*run)(void *), void *argument);

/* interrupts.c */
int test_hold(struct test_answer *answer, const u64 *arguments);
int test_holding(struct test_answer *answer, const u64 *arguments);
int test_nmi(struct test_answer *answer, const u64 *arguments);
int test_interrupts_init(void);
void test_interrupts_exit(void);

/* hypercall.c */
int test_hypercall(struct test_answer *answer, const u64 *arguments);

/* hidden.c */
int test_hidden_find(struct test_answer *answer, const u64 *arguments);
int test_hidden_read(struct test_answer *answer, const u64 *arguments);
int test_hidden_write(struct test_answer *answer, const u64 *arguments);

/* map.c */
struct file;
struct vm_area_struct;
int test_mmap(struct file *file, struct vm_area_struct *vma);

/* state.c */
int test_rdmsr(struct test_answer *answer, const u64 *arguments);
int test_wrmsr(struct test_answer *answer, const u64 *arguments);
int test_clear_cr4(struct test_answer *answer, const u64 *arguments);
int test_vmxoff(struct test_answer *answer, const u64 *arguments);
int test_state(struct test_answer *answer, const u64 *arguments);

/* refuse.c */
int test_refuse(struct test_answer *answer, const u64 *arguments);
int test_restless(struct test_answer *answer, const u64 *arguments);
int test_wait(struct test_answer *answer, const u64 *arguments);
int test_refuse_init(void);
void test_refuse_exit(void);

/* death.c */
int test_hang(struct test_answer *answer, const u64 *arguments);
int test_hang_all(struct test_answer *answer, const u64 *arguments);
int test_soft_hang(struct test_answer *answer, const u64 *arguments);
int test_hang_in_nmi(struct test_answer *answer, const u64 *arguments);
int test_oops(struct test_answer *answer, const u64 *arguments);
int test_hang_and_panic(struct test_answer *answer, const u64 *arguments);
int test_triple_fault(struct test_answer *answer, const u64 *arguments);

/* flip.c */
int test_flip_code(struct test_answer *answer, const u64 *arguments);
int test_flip_data(struct test_answer *answer, const u64 *arguments);
int test_flip_slab(struct test_answer *answer, const u64 *arguments);
int test_flip_stack(struct test_answer *answer, const u64 *arguments);
int test_flip_page_table(struct test_answer *answer, const u64 *arguments);
int test_flip_register(struct test_answer *answer, const u64 *arguments);
void test_flip_exit(void);

/* pause.c */
int test_stop(struct test_answer *answer, const u64 *arguments);
int test_hpet(struct test_answer *answer, const u64 *arguments);

/* send.c */
int test_send_read_only(struct test_answer *answer, const u64 *arguments);

/* queue.c */
int test_queue_without_pages(struct test_answer *answer, const u64 *arguments);

/* sum.c */
int test_sum(struct test_answer *answer, const u64 *arguments);
int test_flip(struct test_answer *answer, const u64 *arguments);

#endif /* MERCURY_TEST_H */
