// SPDX-License-Identifier: GPL-2.0-only
/*
 * Random hypercalls from kernel mode, with an exception table entry. The call that detaches is left out:
 * the hypervisor would obey it.
 */
#include <linux/sched/signal.h>
#include <asm/alternative.h>
#include <asm/asm.h>
#include <asm/cpufeatures.h>

#include "mercury_test.h"

struct call {
	u64 rax, rcx, rdx, rbx, rsi, rdi, r8, r9, r10, r11;
};

/* Returns true if the instruction was executed. */
static noinline bool hypercall(struct call *call)
{
	register u64 r8 asm("r8") = call->r8;
	register u64 r9 asm("r9") = call->r9;
	register u64 r10 asm("r10") = call->r10;
	register u64 r11 asm("r11") = call->r11;
	u64 faulted = 1;

	asm volatile("1:	" ALTERNATIVE("vmcall", "vmmcall", X86_FEATURE_VMMCALL) "\n"
		     "	xorl	%k[faulted], %k[faulted]\n"
		     "2:\n"
		     _ASM_EXTABLE(1b, 2b)
		     : "+a" (call->rax), "+c" (call->rcx), "+d" (call->rdx), "+b" (call->rbx),
		       "+S" (call->rsi), "+D" (call->rdi), "+r" (r8), "+r" (r9), "+r" (r10),
		       "+r" (r11), [faulted] "+r" (faulted)
		     :
		     : "cc", "memory");
	call->r8 = r8;
	call->r9 = r9;
	call->r10 = r10;
	call->r11 = r11;
	return !faulted;
}

static u64 next_random(u64 *state)
{
	*state ^= *state >> 12;
	*state ^= *state << 25;
	*state ^= *state >> 27;
	return *state * 0x2545f4914f6cdd1dULL;
}

/* Half of the calls have the magic, and half a small number. */
static void randomize(struct call *call, u64 *state)
{
	u64 *word;

	for (word = (u64 *)call; word < (u64 *)(call + 1); word++)
		*word = next_random(state);
	if (next_random(state) & 1)
		call->rcx = MERCURY_HYPERCALL_MAGIC;
	if (next_random(state) & 1)
		call->rax &= 7;
	if (call->rcx == MERCURY_HYPERCALL_MAGIC && call->rax == MERCURY_HYPERCALL_DETACH)
		call->rax = MERCURY_HYPERCALL_PING;
}

/* Returns true if the call may get this answer. */
static bool is_legal(const struct call *asked, const struct call *got)
{
	bool kept = got->rcx == asked->rcx && got->rbx == asked->rbx && got->rsi == asked->rsi &&
		    got->rdi == asked->rdi && got->r8 == asked->r8 && got->r9 == asked->r9 &&
		    got->r10 == asked->r10 && got->r11 == asked->r11;

	if (!kept || asked->rcx != MERCURY_HYPERCALL_MAGIC)
		return false;
	switch (asked->rax) {
	case MERCURY_HYPERCALL_PING:
		return got->rax == MERCURY_CODE_OK && got->rdx == MERCURY_ABI_VERSION;
	case MERCURY_HYPERCALL_FLUSH:
		return got->rax == MERCURY_CODE_OK;
	case MERCURY_HYPERCALL_SNAPSHOT:
		return got->rax == MERCURY_CODE_NO_SNAPSHOT;
	default:
		return got->rax == MERCURY_CODE_UNKNOWN_OPERATION ||
		       got->rax == MERCURY_CODE_BAD_ARGUMENT;
	}
}

/* hypercall SEED COUNT: calls from the CPU that runs the command */
int test_hypercall(struct test_answer *answer, const u64 *arguments)
{
	u64 state = arguments[0] | 1, undefined = 0, ok = 0, refused = 0, illegal = 0, i;

	for (i = 0; i < arguments[1] && !signal_pending(current); i++) {
		struct call asked, got;

		randomize(&asked, &state);
		got = asked;
		if (!hypercall(&got)) {
			if (memcmp(&asked, &got, sizeof(got)))
				illegal++;
			undefined++;
		} else if (!is_legal(&asked, &got)) {
			illegal++;
		} else if (got.rax == MERCURY_CODE_OK) {
			ok++;
		} else {
			refused++;
		}
		cond_resched();
	}
	test_say(answer, "undefined %llu\nok %llu\nrefused %llu\nillegal %llu\n", undefined, ok,
		 refused, illegal);
	return 0;
}
