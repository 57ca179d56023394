/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * The way from the kernel that loaded an image into the kernel of the image. switch/abi/src/restart.rs
 * describes it and gives the offsets. Every CPU takes this way natively, with interrupts off.
 */
#include <asm/segment.h>

#include "../attach/gate_common.S"

#define SAVED(name)	MERCURY_SAVED_CPU_##name(%rdi)
#define LANDING(name)	MERCURY_LANDING_##name(%rdx)
#define LIST(name)	MERCURY_LANDING_LIST_##name(%r8)

	.text
/*
 * int mercury_save(struct mercury_saved_cpu *saved)
 *
 * Returns twice: 0 now, and 1 in a machine that was brought back; or MERCURY_ROLLED_BACK in one that the
 * hypervisor beneath it has put back.
 */
SYM_FUNC_START(mercury_save)
	movq	%rbx, SAVED(REGISTERS + 0)
	movq	%rbp, SAVED(REGISTERS + 8)
	movq	%r12, SAVED(REGISTERS + 16)
	movq	%r13, SAVED(REGISTERS + 24)
	movq	%r14, SAVED(REGISTERS + 32)
	movq	%r15, SAVED(REGISTERS + 40)
	pushfq
	popq	SAVED(RFLAGS)
	movq	(%rsp), %rax
	movq	%rax, SAVED(RIP)
	leaq	8(%rsp), %rax
	movq	%rax, SAVED(RSP)
	movq	%ds, %rax
	movq	%rax, SAVED(DATA_SELECTORS + 0)
	movq	%es, %rax
	movq	%rax, SAVED(DATA_SELECTORS + 8)
	xorl	%eax, %eax
	RET
SYM_FUNC_END(mercury_save)

/*
 * Entered by each CPU from the landing. RDI: the physical address of its struct mercury_saved_cpu, which
 * is mapped there; so is this page at its own address. CR4 has neither PGE nor PCIDE.
 */
SYM_CODE_START(mercury_resume)
	UNWIND_HINT_NONE
	ANNOTATE_NOENDBR
	/* CR0 before CR4: CR4.CET needs CR0.WP. */
	movq	SAVED(CR0), %rax
	movq	%rax, %cr0
	movq	SAVED(CR3), %rax
	movq	SAVED(CR4), %rbx
	movq	SAVED(VIRT), %rsi
	/* CR4.PCIDE may only be set while CR3 holds PCID 0. */
	movq	%rax, %rcx
	andq	$~0xfff, %rcx
	movq	%rcx, %cr3
	/* PGE changes, which flushes every translation there is. */
	movq	%rbx, %cr4
	movq	%rax, %cr3
	movq	%rsi, %rdi

	lgdt	SAVED(GDTR_LIMIT)
	lidt	SAVED(IDTR_LIMIT)
	movl	$__KERNEL_DS, %eax
	movl	%eax, %ss
	movq	SAVED(DATA_SELECTORS + 0), %rax
	movl	%eax, %ds
	movq	SAVED(DATA_SELECTORS + 8), %rax
	movl	%eax, %es
	xorl	%eax, %eax
	movl	%eax, %fs
	movl	%eax, %gs

	WRITE_MSR MSR_FS_BASE, SAVED(FS_BASE)
	WRITE_MSR MSR_GS_BASE, SAVED(GS_BASE)
	WRITE_MSR MSR_KERNEL_GS_BASE, SAVED(KERNEL_GS_BASE)

	movq	SAVED(RSP), %rsp
	movq	SAVED(REGISTERS + 0), %rbx
	movq	SAVED(REGISTERS + 8), %rbp
	movq	SAVED(REGISTERS + 16), %r12
	movq	SAVED(REGISTERS + 24), %r13
	movq	SAVED(REGISTERS + 32), %r14
	movq	SAVED(REGISTERS + 40), %r15
	pushq	$__KERNEL_CS
	pushq	SAVED(RIP)
	pushq	SAVED(RFLAGS)
	movl	$1, %eax
	popfq
	lretq
	int3
SYM_CODE_END(mercury_resume)
_ASM_NOKPROBE(mercury_resume)

/* The handler of interrupts that must not be handled. */
SYM_CODE_START(mercury_no_handler)
	UNWIND_HINT_IRET_REGS
	ENDBR
	iretq
SYM_CODE_END(mercury_no_handler)
_ASM_NOKPROBE(mercury_no_handler)

/*
 * void mercury_land(u64 root, u64 code, u64 landing, u64 index), all of them physical addresses but the last
 *
 * Leaves this kernel for good. `root` maps it as it is, and all memory at its physical address.
 */
SYM_CODE_START(mercury_land)
	UNWIND_HINT_FUNC
	ENDBR
	cli
	/* CR4.PCIDE may only be cleared while CR3 holds PCID 0. */
	movq	%cr3, %rax
	andq	$~0xfff, %rax
	movq	%rax, %cr3
	movq	%cr4, %rax
	andq	$~(X86_CR4_PGE | X86_CR4_PCIDE | X86_CR4_CET), %rax
	movq	%rax, %cr4
	movq	%rdi, %cr3
	ANNOTATE_RETPOLINE_SAFE
	jmp	*%rsi
	int3
SYM_CODE_END(mercury_land)
_ASM_NOKPROBE(mercury_land)

/*
 * The code of the landing, which is copied to a page, and runs there at its physical address without a
 * stack. RDX: struct mercury_landing; RCX: the number of this CPU in the image. An exception of any kind
 * resets the machine.
 */
SYM_CODE_START(mercury_landing)
	UNWIND_HINT_NONE
	ANNOTATE_NOENDBR
	movq	LANDING(ROOT_PHYS), %rax
	movq	%rax, %cr3
	lock incl	LANDING(ARRIVED)
	testq	%rcx, %rcx
	jnz	.Lwait_copied

.Lwait_arrived:
	pause
	movl	LANDING(ARRIVED), %eax
	cmpl	LANDING(CPUS), %eax
	jne	.Lwait_arrived

	/* No CPU uses the kernel that was here any more. */
	cld
	movq	LANDING(LIST_PHYS), %r8
.Lnext_list:
	testq	%r8, %r8
	jz	.Lcopied
	movq	LIST(COUNT), %r9
	leaq	LIST(COPIES), %r10
.Lnext_copy:
	testq	%r9, %r9
	jz	.Lend_list
	movq	(%r10), %rdi
	movq	8(%r10), %rsi
	movl	$512, %ecx
	testq	%rsi, %rsi
	jz	.Lzero
	rep movsq
	jmp	.Lone_copied
.Lzero:
	xorl	%eax, %eax
	rep stosq
.Lone_copied:
	addq	$16, %r10
	decq	%r9
	jmp	.Lnext_copy
.Lend_list:
	movq	LIST(NEXT_PHYS), %r8
	jmp	.Lnext_list
.Lcopied:
	xorl	%ecx, %ecx
	movl	$1, LANDING(COPIED)
	jmp	.Lresume

.Lwait_copied:
	pause
	cmpl	$0, LANDING(COPIED)
	je	.Lwait_copied

.Lresume:
	/* The text that comes next may just have been written at another address: fetch nothing ahead. */
	movq	%cr3, %rax
	movq	%rax, %cr3
	movq	LANDING(CPUS_PHYS), %rax
	movq	(%rax,%rcx,8), %rdi
	movq	LANDING(RESUME_VIRT), %rax
	ANNOTATE_RETPOLINE_SAFE
	jmp	*%rax
	int3
SYM_INNER_LABEL(mercury_landing_end, SYM_L_GLOBAL)
	ANNOTATE_NOENDBR
	int3
SYM_CODE_END(mercury_landing)
