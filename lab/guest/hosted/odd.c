/*
 * Odd programs: rare actions of programs, and their results. Each line of output is a fact that must be the same natively
 * and in a hosted machine. A line that begins with "hosted" is printed only if the first argument asks for it.
 *
 *	odd checks		facts, one by one
 *	odd stress SEED COUNT [FILE]	random instructions: a number for each hundred. The cases in the file are left out
 *	odd show SEED FIRST COUNT [FILE]	the same, with each result
 *	odd selectors		loads of segments, each with its result
 *	odd breakpoints		stops at breakpoints, each one
 *	odd segments		ends with the selectors that a new program has
 */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/auxv.h>
#include <sys/mman.h>
#include <asm/ldt.h>
#include <setjmp.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/user.h>
#include <sys/wait.h>
#include <ucontext.h>
#include <unistd.h>

#define AC (1L << 18)
#define TF (1L << 8)
#define NT (1L << 14)
#define RF (1L << 16)
#define ID (1L << 21)

static unsigned char altstack[1 << 16];

/* The contents of the last signal, in memory that children share. */
static struct {
	volatile long signo, code, trap, error, address, rip, flags, cs, count;
} *seen;

/* Maps memory that children share, at the same addresses natively and in a hosted machine. */
static void *shared(size_t size)
{
	static char *at = (char *)0x10400000;
	void *mapped = mmap(at, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);

	if (mapped != at) {
		perror("shared memory");
		exit(1);
	}
	at += (size + 4095) & ~4095UL;
	return mapped;
}

static void note(int signo, siginfo_t *info, void *context)
{
	greg_t *r = ((ucontext_t *)context)->uc_mcontext.gregs;

	seen->signo = signo;
	seen->code = info->si_code;
	seen->trap = r[REG_TRAPNO];
	seen->error = r[REG_ERR];
	seen->address = r[REG_TRAPNO] == 14 ? r[REG_CR2] : 0;
	seen->rip = r[REG_RIP];
	seen->flags = r[REG_EFL];
	seen->cs = r[REG_CSGSFS] & 0xFFFF;
	_exit(0);
}

static void catch_all(void (*handler)(int, siginfo_t *, void *))
{
	static const int signals[] = { SIGSEGV, SIGBUS, SIGILL, SIGFPE, SIGTRAP, SIGSYS, SIGUSR1 };
	struct sigaction action = { .sa_sigaction = handler, .sa_flags = SA_SIGINFO | SA_ONSTACK };
	stack_t stack = { .ss_sp = altstack, .ss_size = sizeof(altstack) };

	sigaltstack(&stack, NULL);
	sigfillset(&action.sa_mask);
	for (unsigned int i = 0; i < sizeof(signals) / sizeof(*signals); i++)
		sigaction(signals[i], &action, NULL);
}

/* Calls a function in a child, and prints the contents of its signal. */
static void try(const char *name, void (*what)(void))
{
	int status;
	pid_t child;

	memset((void *)seen, 0, sizeof(*seen));
	fflush(stdout);
	child = fork();
	if (child == 0) {
		catch_all(note);
		what();
		_exit(1);
	}
	waitpid(child, &status, 0);
	printf("%s%s: status %#x signal %ld code %ld trap %ld error %#lx address %#lx flags %#lx cs %#lx\n",
	       strncmp(name, "hosted", 6) ? "odd: " : "", name, status, seen->signo, seen->code, seen->trap, seen->error, seen->address, seen->flags & ~0x8D5L, seen->cs);
}

static void unaligned(void)
{
	static char bytes[16] __attribute__((aligned(16)));

	asm volatile("pushfq; orl %0, (%%rsp); popfq; movl (%1), %%eax" : : "i"(AC), "r"(bytes + 1) : "eax", "memory");
}

static void unaligned_call(void)
{
	/* A system call with AC set, in which the kernel makes an unaligned access. */
	static char bytes[16] __attribute__((aligned(16)));
	long result;

	asm volatile("pushfq; orl %2, (%%rsp); popfq; syscall; pushfq; andl %3, (%%rsp); popfq"
		     : "=a"(result) : "0"(39L), "i"(AC), "i"(~AC), "D"(bytes + 1) : "rcx", "r11", "memory");
	if (result == getpid())
		_exit(42);
}

/* Counts the system calls that lose a flag of the program. */
static int lost_flags(long flags)
{
	int lost = 0;

	for (int i = 0; i < 100; i++) {
		long kept = 39;

		asm volatile("pushfq; orq %1, (%%rsp); popfq; syscall; pushfq; pop %0; pushfq; andq %2, (%%rsp); popfq"
			     : "+a"(kept) : "r"(flags), "r"(~flags) : "rcx", "r11", "memory", "cc");
		lost += (kept & flags) != flags;
	}
	return lost;
}

static void flags_in_calls(void)
{
	printf("odd: flags lost in calls: NT %d, AC %d, ID %d, DF %d, all %d\n", lost_flags(NT), lost_flags(AC),
	       lost_flags(ID), lost_flags(1 << 10), lost_flags(NT | AC | ID | 1 << 10));
}

static void step_once(void)
{
	asm volatile("pushfq; orl %0, (%%rsp); popfq; nop; nop" : : "i"(TF) : "memory");
}

static void trap_by_byte(void) { asm volatile(".byte 0xF1"); }
static void breakpoint(void) { asm volatile("int3"); }
static void overflow(void) { asm volatile("int $4"); }
static void gate_80(void) { asm volatile("int $0x80" : : "a"(20)); }
static void virtual_call(void) { ((long (*)(void *, void *))0xFFFFFFFFFF600000)(NULL, NULL); }
static void gate_32(void) { asm volatile("int $0x20"); }
static void privileged(void) { asm volatile("hlt"); }
static void undefined(void) { asm volatile("ud2"); }
static void divide(void) { asm volatile("xor %%ecx, %%ecx; div %%ecx" : : : "eax", "ecx", "edx"); }
static void high_read(void) { *(volatile char *)0x600000000000; }
static void high_write(void) { *(volatile char *)0x600000000000 = 1; }
static void higher_read(void) { *(volatile char *)0x7E8000000000; }
static void kernel_read(void) { *(volatile char *)0xFFFFFFFF81000000; }
static void null_read(void) { *(volatile char *)0; }
static void beyond(void) { *(volatile char *)0x8000000000000000; }
static void jump_null(void) { ((void (*)(void))0)(); }
static void jump_high(void) { ((void (*)(void))0x600000000000)(); }
static void jump_kernel(void) { ((void (*)(void))0xFFFFFFFF81000000)(); }
static void jump_beyond(void) { ((void (*)(void))0x8000000000000000)(); }
static void stack_beyond(void) { asm volatile("mov %0, %%rsp; push %%rax" : : "r"(0x8000000000000000)); }

static void segment_loads(void)
{
	asm volatile("mov %0, %%ds; mov %0, %%es; mov %0, %%ss; mov %1, %%ds" : : "r"(0x2B), "r"(0));
	asm volatile("mov %0, %%ss" : : "r"(0x1B));
}

static void segment_beyond(void) { asm volatile("mov %0, %%ds" : : "r"(0xFFF3)); }

/* Loads selectors into a segment's register: all of the descriptor tables' first entries, and some far beyond. */
#define SELECTORS 0x140
static volatile long load_error, load_resume;
static int shows_loads;

static void note_load(int signo, siginfo_t *info, void *context)
{
	greg_t *r = ((ucontext_t *)context)->uc_mcontext.gregs;

	load_error = signo << 24 | info->si_code << 16 | r[REG_TRAPNO] << 8 | 0xFF000000000;
	load_error += r[REG_ERR] << 44;
	r[REG_RIP] = load_resume;
}

/* The bases of FS and GS are kept, since thread-local data is there. */
#define LOAD(segment)                                                                                                  \
	static long load_##segment(long selector)                                                                      \
	{                                                                                                              \
		long got = 0;                                                                                          \
                                                                                                                       \
		asm volatile("rdfsbase %%r8; rdgsbase %%r9; lea 1f(%%rip), %%rcx; mov %%rcx, %1\n"                     \
			     "mov %2, %%" #segment "; mov %%" #segment ", %0\n"                                        \
			     "1: mov %3, %%" #segment "; wrfsbase %%r8; wrgsbase %%r9"                                 \
			     : "+r"(got), "=m"(load_resume)                                                            \
			     : "r"(selector), "r"(#segment[0] == 's' ? 0x2BL : 0L)                                     \
			     : "rcx", "r8", "r9", "memory");                                                           \
		return got;                                                                                            \
	}

LOAD(ds)
LOAD(es)
LOAD(fs)
LOAD(gs)
LOAD(ss)

/* A far return, except to the two code segments of programs. */
static long load_cs(long selector)
{
	if (selector == 0x23 || selector == 0x33)
		return 0;
	asm volatile("lea 1f(%%rip), %%rcx; mov %%rcx, %0; mov %%rsp, %%r8; push %1; push %%rcx; lretq; 1: mov %%r8, %%rsp"
		     : "=m"(load_resume) : "r"(selector) : "rcx", "r8", "memory");
	return 1;
}

/* A return from an interrupt with a stack segment, except to the segments of programs. */
static long load_by_iret(long selector)
{
	if ((selector | 8) == 0x2B || selector == 0x7B)
		return 0;
	asm volatile("lea 1f(%%rip), %%rcx; mov %%rcx, %0; mov %%rsp, %%r8\n"
		     "push %1; push %%r8; pushfq; push $0x33; push %%rcx; iretq\n"
		     "1: mov %%r8, %%rsp; mov $0x2B, %%ecx; mov %%ecx, %%ss"
		     : "=m"(load_resume) : "r"(selector) : "rcx", "r8", "memory");
	return 1;
}

static unsigned long add(unsigned long sum, unsigned long value);

static void selectors(void)
{
	static const struct {
		const char *name;
		long (*load)(long);
	} all[] = { { "ds", load_ds }, { "es", load_es }, { "fs", load_fs }, { "gs", load_gs },
		    { "ss", load_ss }, { "cs", load_cs }, { "iret", load_by_iret } };

	catch_all(note_load);
	for (unsigned int i = 0; i < sizeof(all) / sizeof(*all); i++) {
		unsigned long sum = 0;
		int loaded = 0;

		for (long n = 0; n < SELECTORS + 32; n++) {
			long selector = n < SELECTORS ? n : 0xFFFF - (n - SELECTORS) * 0x5A7, got;

			load_error = 0;
			got = all[i].load(selector);
			loaded += !load_error;
			sum = add(add(sum, got), load_error);
			if (shows_loads)
				printf("odd: %s %lx: %lx %lx\n", all[i].name, selector, got, load_error);
		}
		printf("odd: selectors in %s: %d loaded, %lx\n", all[i].name, loaded, sum);
	}
}

static void nested(void)
{
	asm volatile("pushfq; orl %0, (%%rsp); popfq; ud2" : : "i"(NT | ID) : "memory");
}

/* Returns from a signal to a state that the processor refuses. */
static long back_to[5];

static void go_there(int signo, siginfo_t *info, void *context)
{
	greg_t *r = ((ucontext_t *)context)->uc_mcontext.gregs;

	if (signo != SIGUSR1)
		note(signo, info, context);
	r[REG_RIP] = back_to[0];
	r[REG_CSGSFS] = (r[REG_CSGSFS] & ~0xFFFFL) | back_to[1];
	r[REG_EFL] |= back_to[2];
	if (back_to[3])
		r[REG_RSP] = back_to[3];
}

static void return_to(long rip, long cs, long flags, long rsp)
{
	back_to[0] = rip;
	back_to[1] = cs;
	back_to[2] = flags;
	back_to[3] = rsp;
	catch_all(go_there);
	raise(SIGUSR1);
}

static void return_beyond(void) { return_to(0x8000000000000000, 0x33, 0, 0); }
static void return_just_beyond(void) { return_to(0x800000000000, 0x33, 0, 0); }
static void return_to_top(void) { return_to(0x7FFFFFFFF000, 0x33, 0, 0); }
static void return_to_kernel(void) { return_to(0xFFFFFFFF81000000, 0x33, 0, 0); }
static void return_stepped(void) { return_to((long)breakpoint, 0x33, TF, 0); }
static void return_kernel_code(void) { return_to((long)breakpoint, 0x10, 0, 0); }
static void return_data(void) { return_to((long)breakpoint, 0x2B, 0, 0); }

static void return_to_32_bits(void)
{
	/* inc %eax, which is a prefix in 64 bits; then INT3 */
	static const unsigned char code[] = { 0x31, 0xC0, 0x40, 0x40, 0x40, 0x0F, 0x0B };
	unsigned char *at = mmap((void *)0x10000000, 4096, PROT_READ | PROT_WRITE | PROT_EXEC,
				 MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);

	memcpy(at, code, sizeof(code));
	return_to((long)at, 0x23, 0, 0x10000800);
}

/* Single-steps a child as a debugger does, through system calls too. */
static void steps(void)
{
	int status;
	long count = 0, calls = 0;
	pid_t child = fork();

	if (child == 0) {
		ptrace(PTRACE_TRACEME, 0, 0, 0);
		raise(SIGSTOP);
		asm volatile("mov $50, %%ebx\n1: mov $39, %%eax; syscall; dec %%ebx; jnz 1b; ud2"
			     : : : "eax", "ebx", "ecx", "r11");
	}
	waitpid(child, &status, 0);
	while (count < 100000) {
		struct user_regs_struct r;

		ptrace(PTRACE_GETREGS, child, 0, &r);
		if (WIFSTOPPED(status) && WSTOPSIG(status) == SIGILL)
			break;
		if (WIFSTOPPED(status) && WSTOPSIG(status) == SIGTRAP && r.rax == (unsigned long)child)
			calls++;
		if (ptrace(PTRACE_SINGLESTEP, child, 0, 0) || waitpid(child, &status, 0) != child || !WIFSTOPPED(status))
			break;
		count++;
	}
	printf("odd: stepped: status %#x, through calls %d, more than 200 steps %d\n", status, calls >= 50, count > 200);
	kill(child, SIGKILL);
	waitpid(child, &status, 0);
}

static volatile long step_traps, step_signals;

/* Sends this process another signal at each step. It is delivered where the step's signal returns to. */
static void signal_at_step(int signo, siginfo_t *info, void *context)
{
	if (signo == SIGUSR1) {
		step_signals++;
	} else {
		step_traps++;
		kill(getpid(), SIGUSR1);
	}
}

/* Steps through arithmetic, calls, string instructions and flags, with two signals at each step. */
static void signals_at_each_step(void)
{
	static unsigned char from[64] = "some bytes", to[64];
	unsigned long sum = 0;

	catch_all(signal_at_step);
	asm volatile("pushfq; orl %3, (%%rsp); popfq\n"
		     "mov $30, %%ebx\n"
		     "1: mov $39, %%eax; syscall; mov %%rbx, %%rax; imul $0x1234567, %%rax; add %%rax, %0; adc $0, %0\n"
		     "mov %1, %%rsi; mov %2, %%rdi; mov $7, %%ecx; rep movsb\n"
		     "push %0; rolq $5, (%%rsp); pop %0; call 2f; jmp 3f; 2: ret; 3: dec %%ebx; jnz 1b\n"
		     "pushfq; andl %4, (%%rsp); popfq"
		     : "+&r"(sum) : "r"(from), "r"(to), "i"(TF), "i"(~TF)
		     : "rax", "rbx", "rcx", "rsi", "rdi", "r11", "memory", "cc");
	signal(SIGTRAP, SIG_DFL);
	signal(SIGUSR1, SIG_DFL);
	printf("odd: signals at each step: %ld traps, %ld signals, sum %lx, %.16s\n", step_traps, step_signals, sum, to);
}

/* Sets a program's flags as a debugger does, and lets the program run. */
static void traced_flags(void)
{
	int status;
	struct user_regs_struct r;
	pid_t child = fork();

	if (child == 0) {
		ptrace(PTRACE_TRACEME, 0, 0, 0);
		raise(SIGSTOP);
		_exit(0);
	}
	waitpid(child, &status, 0);
	ptrace(PTRACE_GETREGS, child, 0, &r);
	r.eflags |= AC | NT | ID;
	ptrace(PTRACE_SETREGS, child, 0, &r);
	ptrace(PTRACE_GETREGS, child, 0, &r);
	printf("odd: traced: flags %#llx\n", r.eflags & (AC | NT | ID | TF));
	kill(child, SIGKILL);
	waitpid(child, &status, 0);
}

/* Sets a program's GS to a selector of a table that it does not have, as a debugger does, and lets the program read it. */
static void traced_selector(void)
{
	int status;
	pid_t child = fork();

	if (child == 0) {
		unsigned short selector;

		ptrace(PTRACE_TRACEME, 0, 0, 0);
		raise(SIGSTOP);
		asm volatile("mov %%gs, %0" : "=r"(selector));
		_exit(selector);
	}
	waitpid(child, &status, 0);
	ptrace(PTRACE_POKEUSER, child, offsetof(struct user_regs_struct, gs), 7);
	ptrace(PTRACE_CONT, child, 0, 0);
	waitpid(child, &status, 0);
	printf("odd: traced: selector %#x\n", status);
}

/* Starts a function in a traced child, which has stopped before it. */
static pid_t start_traced(void (*what)(void))
{
	int status;
	pid_t child;

	fflush(stdout);
	child = fork();
	if (child == 0) {
		ptrace(PTRACE_TRACEME, 0, 0, 0);
		raise(SIGSTOP);
		what();
		_exit(0);
	}
	waitpid(child, &status, 0);
	return child;
}

static long set_debug(pid_t child, int number, unsigned long value)
{
	return ptrace(PTRACE_POKEUSER, child, offsetof(struct user, u_debugreg[number]), value) ? errno : 0;
}

/* The bits of DR7 for a breakpoint: EXECUTED, WRITTEN or USED, and the number of bytes. */
enum { EXECUTED = 0, WRITTEN = 1, USED = 3 };

static unsigned long breakpoint_bits(int number, int kind, int length)
{
	const unsigned long lengths[] = { 0, 0, 1, 0, 3, 0, 0, 0, 2 };

	return 1UL << number * 2 | (kind | lengths[length] << 2) << (16 + number * 4);
}

/* Lets a child go on by this request until it ends, and prints its traps. */
static void follow(const char *name, pid_t child, int request, int shows)
{
	unsigned long sum = 0, count = 0, hits[5] = { 0 };
	int status = 0, signo = 0;

	while (count < 100000) {
		struct user_regs_struct r;
		siginfo_t info;
		unsigned long dr6;

		if (ptrace(request, child, 0, signo) || waitpid(child, &status, 0) != child || !WIFSTOPPED(status))
			break;
		signo = WSTOPSIG(status) == SIGTRAP ? 0 : WSTOPSIG(status);
		if (signo)
			continue;
		ptrace(PTRACE_GETREGS, child, 0, &r);
		ptrace(PTRACE_GETSIGINFO, child, 0, &info);
		dr6 = ptrace(PTRACE_PEEKUSER, child, offsetof(struct user, u_debugreg[6]), 0) & 0x400F;
		count++;
		for (int i = 0; i < 4; i++)
			hits[i] += dr6 >> i & 1;
		hits[4] += dr6 >> 14 & 1;
		sum = add(add(sum, info.si_code), r.rip);
		sum = add(add(sum, dr6), r.eflags & (TF | NT | AC | ID));
		if (shows)
			printf("odd: %s: at %#llx code %#x DR6 %#lx flags %#llx\n", name, r.rip, info.si_code, dr6, r.eflags & TF);
	}
	printf("odd: %s: %lu stops, breakpoints %lu %lu %lu %lu, steps %lu, status %#x, %lx\n", name, count, hits[0], hits[1], hits[2], hits[3], hits[4], status, sum);
	kill(child, SIGKILL);
	waitpid(child, &status, 0);
}

/* Memory with breakpoints, of a child's own. */
static volatile unsigned char watched[64] __attribute__((aligned(64)));

/* Labels of code with breakpoints, in an order that the compiler does not change. */
extern char looped[], loop_end[];

static void loop_to_trace(void)
{
	asm volatile(".global looped, loop_end\nmov $7, %%ecx\nlooped: nop\nmov $39, %%eax\npush %%rcx\nsyscall\npop %%rcx\n"
		     "loop_end: dec %%ecx\njnz looped" : : : "rax", "rcx", "r11", "memory");
}

/* Uses all bytes around a breakpoint, with each size and each kind of access. */
static void use_watched(void)
{
	for (int at = 0; at < 40; at++) {
		volatile unsigned char *byte = watched + at;

		*byte = 1;
		*(volatile unsigned short *)byte;
		*(volatile unsigned int *)byte = 2;
		*(volatile unsigned long *)byte |= 4;
		asm volatile("movdqu (%0), %%xmm0; movdqu %%xmm0, (%0)" : : "r"(byte) : "xmm0", "memory");
		asm volatile("lea (%0), %%rax; prefetcht0 (%0); testb $1, (%0)" : : "r"(byte) : "rax", "memory", "cc");
	}
}

/* Instructions with memory that no operand names, or that use the flags. */
static void use_otherwise(void)
{
	unsigned long before = 0, within = 0, after = 0;

	asm volatile("mov %%rsp, %%r8; lea 24(%3), %%rsp\n"
		     "pushfq; pop %0\n"
		     "push $1; call 1f; 1: pop %%rax; pop %%rax\n"
		     "lea 16(%3), %%rsi; lea 8(%3), %%rdi; movsq; cld; mov $3, %%ecx; rep stosb; xor %%ecx, %%ecx; rep stosb\n"
		     "lea 16(%3), %%rdi; mov %%rdi, %%rbx; mov $0, %%eax; cmpsb; xlatb\n"
		     "pushfq; orl %4, (%%rsp); popfq; pushfq; pop %1; andl %5, -8(%%rsp); sub $8, %%rsp; popfq\n"
		     "pushfq; pop %2; pushfw; popfw; mov %%r8, %%rsp"
		     : "=&r"(before), "=&r"(within), "=&r"(after) : "r"(watched), "i"(TF), "i"(~TF)
		     : "rax", "rbx", "rcx", "rsi", "rdi", "r8", "memory", "cc");
	if ((before | after) & TF || !(within & TF))
		_exit(1);
}

/* Memory that the kernel writes, a fault of the memory, and children that are not traced. */
static void use_indirectly(void)
{
	volatile char *const late = (volatile char *)0x10800000;
	int ends[2], status;
	pid_t child;

	if (pipe(ends) || write(ends[1], "text", 4) != 4 || read(ends[0], (void *)(watched + 8), 4) != 4)
		_exit(1);
	watched[8]++;
	mmap((void *)late, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
	late[8] = 1;
	late[8] = 1;
	child = fork();
	if (child == 0) {
		watched[8]++;
		late[8]++;
		_exit(0);
	}
	if (waitpid(child, &status, 0) != child || status)
		_exit(1);
}

/* Breakpoints in a child's debug registers, as a debugger sets them. */
static void breakpoints(int shows)
{
	const unsigned long all = breakpoint_bits(0, WRITTEN, 1) | breakpoint_bits(1, WRITTEN, 2) | breakpoint_bits(2, USED, 4) | breakpoint_bits(3, USED, 8);
	static const struct { int kind, length; } ways[] = { { WRITTEN, 1 }, { WRITTEN, 2 }, { WRITTEN, 4 }, { WRITTEN, 8 }, { USED, 1 }, { USED, 8 } };
	pid_t child;

	child = start_traced(loop_to_trace);
	set_debug(child, 0, (unsigned long)looped);
	set_debug(child, 1, (unsigned long)loop_end);
	printf("odd: breakpoints: %ld", set_debug(child, 7, breakpoint_bits(0, EXECUTED, 1) | breakpoint_bits(1, EXECUTED, 1)));
	printf(" %ld %ld", set_debug(child, 0, -4096L), set_debug(child, 7, breakpoint_bits(0, WRITTEN, 2) | 2UL << 20));
	printf(" %ld\n", set_debug(child, 4, 0));
	set_debug(child, 0, (unsigned long)looped);
	set_debug(child, 7, breakpoint_bits(0, EXECUTED, 1) | breakpoint_bits(1, EXECUTED, 1));
	follow("breakpoints in code", child, PTRACE_CONT, shows);
	child = start_traced(loop_to_trace);
	set_debug(child, 2, (unsigned long)looped);
	set_debug(child, 7, breakpoint_bits(2, EXECUTED, 1));
	follow("breakpoints in code, stepped", child, PTRACE_SINGLESTEP, shows);
	for (unsigned int i = 0; i < sizeof(ways) / sizeof(*ways); i++) {
		char name[64];

		child = start_traced(use_watched);
		set_debug(child, 3, (unsigned long)watched + 16);
		set_debug(child, 7, breakpoint_bits(3, ways[i].kind, ways[i].length));
		snprintf(name, sizeof(name), "watched memory, kind %d, %d bytes", ways[i].kind, ways[i].length);
		follow(name, child, PTRACE_CONT, shows);
	}
	for (int stepped = 0; stepped < 2; stepped++) {
		child = start_traced(use_otherwise);
		for (int i = 0; i < 4; i++)
			set_debug(child, i, (unsigned long)watched + 8);
		set_debug(child, 0, (unsigned long)watched + 16);
		set_debug(child, 7, all);
		follow(stepped ? "watched stack, stepped" : "watched stack", child, stepped ? PTRACE_SINGLESTEP : PTRACE_CONT, shows);
	}
	child = start_traced(use_indirectly);
	set_debug(child, 0, (unsigned long)watched + 8);
	set_debug(child, 1, 0x10800008);
	set_debug(child, 7, breakpoint_bits(0, WRITTEN, 4) | breakpoint_bits(1, WRITTEN, 1));
	follow("watched memory, used indirectly", child, PTRACE_CONT, shows);
	child = start_traced(use_watched);
	set_debug(child, 0, (unsigned long)watched);
	set_debug(child, 7, breakpoint_bits(0, USED, 8));
	set_debug(child, 7, 0);
	follow("watched memory no more", child, PTRACE_CONT, shows);
}

/* Replaces a byte of a child's code. Returns the old byte. */
static long replace_code(pid_t child, char *at, long byte)
{
	long word = ptrace(PTRACE_PEEKTEXT, child, at, 0);

	ptrace(PTRACE_POKETEXT, child, at, (word & ~0xFFL) | byte);
	return word & 0xFF;
}

/* Sets INT3 in a child's loop, and goes on at each stop as a debugger does: the old byte, one step, INT3 again. */
static void software_breakpoints(void)
{
	pid_t child = start_traced(loop_to_trace);
	const long old[2] = { replace_code(child, looped, 0xCC), replace_code(child, loop_end, 0xCC) };
	unsigned long sum = 0, count = 0;
	int status;

	while (!ptrace(PTRACE_CONT, child, 0, 0) && waitpid(child, &status, 0) == child && WIFSTOPPED(status) && count < 100) {
		struct user_regs_struct r;
		siginfo_t info;
		int which;

		ptrace(PTRACE_GETREGS, child, 0, &r);
		ptrace(PTRACE_GETSIGINFO, child, 0, &info);
		sum = add(add(add(sum, r.rip), status), info.si_code);
		count++;
		r.rip--;
		which = r.rip == (unsigned long)loop_end;
		ptrace(PTRACE_SETREGS, child, 0, &r);
		replace_code(child, (char *)r.rip, old[which]);
		ptrace(PTRACE_SINGLESTEP, child, 0, 0);
		waitpid(child, &status, 0);
		sum = add(add(sum, status), ptrace(PTRACE_PEEKUSER, child, offsetof(struct user_regs_struct, rip), 0));
		replace_code(child, (char *)r.rip, 0xCC);
	}
	printf("odd: software breakpoints: %lu stops, status %#x, %lx\n", count, status, sum);
	kill(child, SIGKILL);
	waitpid(child, &status, 0);
}

/* Keeps the flags of two programs apart that yield to one another. */
static void kept_flags(void)
{
	int status, bad = 0;
	pid_t child = fork();
	long wanted = child ? ID : 0;

	for (int i = 0; i < 2000; i++) {
		long flags;

		asm volatile("pushfq; pop %0" : "=r"(flags));
		flags = (flags & ~ID) | wanted;
		asm volatile("push %0; popfq" : : "r"(flags) : "cc");
		if (i % 50 == 0)
			usleep(1);
		for (volatile int wait = 0; wait < 200; wait++)
			;
		asm volatile("pushfq; pop %0" : "=r"(flags));
		bad += (flags & ID) != wanted && i % 50;
	}
	if (!child)
		_exit(bad != 0);
	waitpid(child, &status, 0);
	printf("odd: kept flags: %d %d\n", bad, status);
}

/* Loads selectors into DS, ES and GS, which thread-local data is not in, and yields. Counts the times that they were others. */
static long lost_selectors(long ds, long es, long gs)
{
	long lost = 0;

	asm volatile("mov %0, %%ds; mov %1, %%es; mov %2, %%gs" : : "r"(ds), "r"(es), "r"(gs));
	for (int i = 0; i < 500; i++) {
		long now[3] = { 0, 0, 0 };

		usleep(1);
		asm volatile("mov %%ds, %k0; mov %%es, %k1; mov %%gs, %k2" : "=r"(now[0]), "=r"(now[1]), "=r"(now[2]));
		lost += now[0] != ds || now[1] != es || now[2] != gs;
	}
	asm volatile("mov %0, %%ds; mov %0, %%es; mov %0, %%gs" : : "r"(0));
	return lost;
}

static void *lose_selectors(void *unused)
{
	return (void *)lost_selectors(0x23, 0, 0x2B);
}

/* Keeps the selectors of processes and threads apart that yield to one another. A new program has none. */
static void kept_selectors(void)
{
	void *lost_by_thread = (void *)-1;
	int status, new_program;
	pid_t child = fork();
	pthread_t thread;
	long lost;

	if (!child)
		_exit(lost_selectors(0x33, 0x2B, 0) != 0);
	pthread_create(&thread, NULL, lose_selectors, NULL);
	lost = lost_selectors(0x2B, 0x33, 0x23);
	pthread_join(thread, &lost_by_thread);
	waitpid(child, &status, 0);
	asm volatile("mov %0, %%ds; mov %0, %%es; mov %0, %%gs" : : "r"(0x2B));
	child = fork();
	if (!child) {
		execl("/proc/self/exe", "odd", "segments", NULL);
		execl("/bin/odd", "odd", "segments", NULL);
		_exit(127);
	}
	asm volatile("mov %0, %%ds; mov %0, %%es; mov %0, %%gs" : : "r"(0));
	waitpid(child, &new_program, 0);
	printf("odd: kept selectors: %ld %ld %#x, of a new program %#x\n", lost, (long)lost_by_thread, status, new_program);
}

/* Returns 0 if there is no selector in DS, ES, FS and GS. */
static int segments(void)
{
	int ds, es, fs, gs;

	asm volatile("mov %%ds, %0; mov %%es, %1; mov %%fs, %2; mov %%gs, %3" : "=r"(ds), "=r"(es), "=r"(fs), "=r"(gs));
	return (ds | es | fs | gs) & 0xFF;
}

static const char *outcome(void *got, void *wanted)
{
	if (got == MAP_FAILED)
		return strerrorname_np(errno);
	return got == wanted ? "there" : "elsewhere";
}

/* Checks that new memory is zero, writable and at the requested address, or is refused. */
static int is_memory(void *at, size_t length)
{
	for (size_t i = 0; i < length; i += 4096) {
		if (((volatile char *)at)[i])
			return 0;
		((volatile char *)at)[i] = 1;
	}
	return 1;
}

static void low_memory(void)
{
	const size_t length = 64 << 20;
	char *given[8];
	int good = 0;

	for (int i = 0; i < 8; i++) {
		char *at = mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_32BIT, -1, 0);

		given[i] = at;
		if (at != MAP_FAILED && (uintptr_t)at + length <= 0x80000000 && is_memory(at, 1 << 20))
			good++;
	}
	for (int i = 0; i < 8; i++)
		munmap(given[i], length);
	printf("odd: 32 bits: %d\n", good);
}

/* Maps memory everywhere below 8 GiB, and at some places above, and checks each mapping. */
static void everywhere(void)
{
	static const int how[] = { 0, MAP_FIXED_NOREPLACE };
	int given = 0, refused = 0, bad = 0;

	for (uintptr_t at = 0x1000; at < 0x200000000; at += 0x1000000) {
		for (int i = 0; i < 2; i++) {
			void *got = mmap((void *)at, 8192, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | how[i], -1, 0);

			if (got == MAP_FAILED) {
				refused++;
				continue;
			}
			given++;
			bad += !is_memory(got, 8192);
			munmap(got, 8192);
		}
	}
	printf("odd: everywhere: bad %d, most given %d\n", bad, given > refused);
}

/* Lets the kernel grow a child's stack that begins where the addresses begin again that programs can have. */
static const char *grow_to_the_hole(void)
{
	const int how = MAP_PRIVATE | MAP_ANONYMOUS | MAP_GROWSDOWN | MAP_FIXED_NOREPLACE;
	const char *outcome;
	int status;
	pid_t child;

	seen->address = 0;
	fflush(stdout);
	child = fork();
	if (child == 0) {
		ptrace(PTRACE_TRACEME, 0, 0, 0);
		for (uintptr_t at = 0x40000000; !seen->address && at < 0x200000000; at += 0x100000)
			if (mmap((void *)at, 4096, PROT_READ | PROT_WRITE, how, -1, 0) != MAP_FAILED)
				seen->address = at;
		raise(SIGSTOP);
		_exit(0);
	}
	waitpid(child, &status, 0);
	errno = 0;
	ptrace(PTRACE_PEEKDATA, child, seen->address, 0);
	outcome = errno ? "nowhere" : "there";
	ptrace(PTRACE_PEEKDATA, child, seen->address - 8, 0);
	outcome = errno ? strerrorname_np(errno) : outcome;
	kill(child, SIGKILL);
	waitpid(child, &status, 0);
	return outcome;
}

static void checks(int hosted)
{
	try("unaligned", unaligned);
	try("unaligned call", unaligned_call);
	try("step", step_once);
	try("trap", trap_by_byte);
	try("breakpoint", breakpoint);
	try("overflow", overflow);
	try("gate", gate_32);
	try("privileged", privileged);
	try("undefined", undefined);
	try("divide", divide);
	try("high read", high_read);
	try("high write", high_write);
	try("higher read", higher_read);
	try("kernel read", kernel_read);
	try("null read", null_read);
	try("beyond", beyond);
	try("jump null", jump_null);
	try("jump high", jump_high);
	try("jump kernel", jump_kernel);
	try("jump beyond", jump_beyond);
	try("stack beyond", stack_beyond);
	try("segment loads", segment_loads);
	try("segment beyond", segment_beyond);
	try("nested", nested);
	try("return beyond", return_beyond);
	try("return just beyond", return_just_beyond);
	try("return to top", return_to_top);
	try("return to kernel", return_to_kernel);
	try("return stepped", return_stepped);
	try("return kernel code", return_kernel_code);
	try("return data", return_data);
	try("return to 32 bits", return_to_32_bits);
	steps();
	signals_at_each_step();
	flags_in_calls();
	traced_flags();
	traced_selector();
	breakpoints(0);
	software_breakpoints();
	kept_flags();
	kept_selectors();
	selectors();
	low_memory();
	everywhere();
	if (hosted) {
		try("hosted: call of 32 bits", gate_80);
		try("hosted: virtual call", virtual_call);
		void *low = mmap((void *)0x1000, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
		void *own;

		printf("hosted: page 1: %s\n", outcome(low, (void *)0x1000));
		struct user_desc segment = { .limit = 0xFFFFF, .seg_32bit = 1, .limit_in_pages = 1, .useable = 1 };
		long made = syscall(SYS_modify_ldt, 1, &segment, sizeof(segment));

		printf("hosted: local descriptor table: %s\n", (int)made ? strerrorname_np((int)made == -1 ? errno : -(int)made) : "there");
		own = mmap((void *)0x38000000, 4096, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
		printf("hosted: the monitor's code: %s\n", outcome(own, (void *)0x38000000));
		own = mmap((void *)0x41000000, 4096, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
		printf("hosted: the kernel's code: %s\n", outcome(own, (void *)0x41000000));
		own = mmap(NULL, 4096, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
		own = mremap(own, 4096, 4096, MREMAP_MAYMOVE | MREMAP_FIXED, (void *)0x38000000);
		printf("hosted: a move to the monitor's code: %s\n", outcome(own, (void *)0x38000000));
		printf("hosted: a stack that grows to the kernel's memory: %s\n", grow_to_the_hole());
	}
}

/* Random instructions. Each is stepped, from registers, flags and memory that are the same in each run. */

#define CODE ((unsigned char *)0x10000000)
#define DATA ((unsigned char *)0x10100000)
#define DATA_SIZE 8192
#define PAGE 4096L
/*
 * The addresses that a program's process shares with the monitor if programs are in processes of their own (STUB to
 * STUB_STATE_END in hosted/runtime/src/layout.rs). Natively nothing is mapped there. A case that faults or jumps there natively
 * reads, writes or executes the monitor's memory in a hosted machine, so its results differ by design.
 */
#define STUB_START 0x3B000000UL
#define STUB_END 0x3B020000UL
/*
 * Without isolation, programs reach the monitor's code, the guest's memory (of the size that the test asks for), and all that the
 * kernel and the monitor have above USER_END.
 */
#define HOLE_START 0x38000000UL
#define HOLE_END 0x50000000UL
#define USER_END 0x500000000000UL
#define MOST_CASES 8192

struct number {
	unsigned long state;
};

static unsigned long next(struct number *n)
{
	n->state ^= n->state << 13;
	n->state ^= n->state >> 7;
	n->state ^= n->state << 17;
	return n->state * 0x2545F4914F6CDD1D;
}

/* State in memory that children share, since a child may end at any instruction. */
static struct {
	volatile unsigned long seed, at, end, sum, shows;
	/* 16 bytes of code, and room for the filling that is_left_out() writes after an instruction. */
	unsigned char bytes[32];
	/* The way in which the present case runs, the address and length of its instruction, and the registers before it. */
	volatile unsigned long way, instruction, length, before;
	/* One byte for each case: the letter of the part of memory at which it faulted, and true if it is left out. */
	char apart[MOST_CASES], left_out[MOST_CASES];
} *run;

/* A case is stepped. Then it may run once more, with a trap after the instruction in place of the step. */
enum { STEPPED, UNSTEPPED };

static unsigned char pristine[DATA_SIZE], first_state[512];
static int has_state;

static unsigned long add(unsigned long sum, unsigned long value)
{
	return (sum ^ value) * 0x100000001B3 + (sum >> 29);
}

static int is_prefix(unsigned char byte, int is_64_bits)
{
	static const unsigned char all[] = { 0x26, 0x2E, 0x36, 0x3E, 0x64, 0x65, 0x66, 0x67, 0xF0, 0xF2, 0xF3 };

	return memchr(all, byte, sizeof(all)) || (is_64_bits && (byte & 0xF0) == 0x40);
}

/* Instructions that depend on the machine, the time or chance, call the kernel, or destroy state of this program. */
static int is_left_out(unsigned char *code, int is_64_bits)
{
	static const unsigned char two[] = { 0x00, 0x01, 0x02, 0x03, 0x05, 0x31, 0x33, 0x34, 0xA1, 0xA2, 0xA9, 0xAE, 0xB2, 0xB4, 0xB5, 0xC7 };
	unsigned char *at = code;

	while (at < code + 8 && is_prefix(*at, is_64_bits))
		at++;
	switch (at[0]) {
	case 0x0F:
		return !!memchr(two, at[1], sizeof(two));
	case 0x8E:
		/* Changes of FS and GS, and a stack selector from memory. */
		if ((at[1] & 0x38) >= 0x20 || ((at[1] & 0x38) == 0x10 && at[1] < 0xC0))
			return 1;
		if (at[1] >= 0xC0)
			memset(at + 2, 0xCC, 12);
		return 0;
	case 0x17: case 0x9D: case 0xCF:
		/* These instructions may end the stepping, for good or for one instruction. */
		memset(at + 1, 0xCC, 12);
		return 0;
	case 0xCD:
		return at[1] == 0x80;
	case 0xC6: case 0xC7:
		return at[1] == 0xF8;
	}
	return 0;
}

static void note_case_apart(unsigned long address)
{
	if (address >= STUB_START && address < STUB_END)
		run->apart[run->at] = 's';
	else if ((address >= HOLE_START && address < HOLE_END) || address >= USER_END)
		run->apart[run->at] = 'k';
}

static unsigned long any_value(struct number *n)
{
	static const unsigned long places[] = {
		0x10100000, 0x10101000, 0x10102000, 0x10100800, 0x10100FF8, 0x10101FF0, 0x10000000, 0,
		0x7FFFFFFFFFF0, 0x800000000000, 0xFFFF800000000000, 0x600000000000, 0x8000000000000000, 0x7FFFFFFF, 0x80000000, 1,
	};
	/* Selectors of programs, of the kernel, of a task and of local descriptor tables. */
	static const unsigned long selectors[] = { 0x23, 0x2B, 0x33, 0x7B, 0x10, 0x18, 0x40, 0x63, 0, 3, 7, 0xF, 0x2C, 0x87, 0x29, 0xFFFF };
	unsigned long kind = next(n);

	switch (kind & 7) {
	case 0:
		return next(n);
	case 1:
		return next(n) & 0xFF;
	case 2:
		return -(next(n) & 0xFF);
	case 3:
		return places[next(n) & 15];
	case 4:
		if (kind & 8)
			return selectors[next(n) & 15];
		/* fallthrough */
	default:
		return 0x10100000 + (next(n) & 0x1FFF);
	}
}

static void set_flags(unsigned long flags)
{
	asm volatile("pushfq; andq %0, (%%rsp); orq %1, (%%rsp); popfq" : : "i"(~(AC | NT | ID)), "r"(flags & (NT | ID)) : "memory", "cc");
}

static void signal_this(void)
{
	long result = 39;

	asm volatile("syscall" : "+a"(result) : : "rcx", "r11", "memory");
	asm volatile("syscall" : "=a"(result) : "0"(62L), "D"(result), "S"((long)SIGUSR1) : "rcx", "r11", "memory");
}

/*
 * Lets all registers be zero that are not in the first 416 bytes of a signal's state: the upper parts of vectors, and those that
 * only AVX-512 has. The C library leaves its own values there.
 */
static void clear_rest(unsigned char *state)
{
	const unsigned int has_more = 0x46505853;

	/* The kernel's mark (struct _fpx_sw_bytes), and the components in use (struct _xstate_header). */
	if (*(unsigned int *)(state + 464) == has_more)
		*(unsigned long *)(state + 512) &= 3;
}

/* Prepares the next case: code, memory, registers, and perhaps a signal that arrives before the instruction. */
static void prepare(ucontext_t *context)
{
	static const int general[] = { REG_RAX, REG_RBX, REG_RCX, REG_RDX, REG_RSI, REG_RDI, REG_RBP, REG_R8, REG_R9,
				       REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15 };
	struct number n = { (run->seed + 1) * 0x9E3779B97F4A7C15 ^ (run->at + 1) * 0xD1B54A32D192ED03 };
	greg_t *r = context->uc_mcontext.gregs;
	unsigned long kind;
	unsigned char *at;
	int is_64_bits, length = 0;

	for (int i = 0; i < 8; i++)
		next(&n);
	is_64_bits = (next(&n) & 3) != 0;
	do {
		static const unsigned char prefixes[] = { 0x66, 0xF2, 0xF3, 0xF0, 0x67, 0x48, 0x64, 0x65, 0x41, 0x44, 0x36, 0x4C };

		length = 0;
		kind = next(&n);
		if (!(kind & 1))
			run->bytes[length++] = prefixes[(kind >> 8) % sizeof(prefixes)];
		if (!(kind & 6))
			run->bytes[length++] = prefixes[(kind >> 16) % sizeof(prefixes)];
		switch (kind >> 24 & 15) {
		case 0: case 1: case 2: case 3: case 4:
			run->bytes[length++] = 0x0F;
			break;
		case 5:
			run->bytes[length++] = 0xC4 + (kind >> 32 & 1);
			break;
		case 6:
			run->bytes[length++] = 0x62;
			break;
		}
		for (; length < 16; length++)
			run->bytes[length] = next(&n);
	} while (is_left_out(run->bytes, is_64_bits));
	memset(CODE, 0xCC, PAGE);
	kind = next(&n);
	at = CODE + (kind & 3 ? (kind >> 8 & 0x7FF) : PAGE - 1 - (kind >> 8 & 15));
	for (int i = 0; i < 16 && at + i < CODE + PAGE; i++)
		at[i] = run->bytes[i];
	memcpy(DATA, pristine, DATA_SIZE);
	for (unsigned int i = 0; i < sizeof(general) / sizeof(*general); i++)
		r[general[i]] = any_value(&n);
	r[REG_RSP] = next(&n) & 7 ? 0x10100800 + (next(&n) & 0x3F8) : any_value(&n);
	r[REG_RIP] = (long)at;
	r[REG_EFL] = (next(&n) & (0x8D5 | 0x400)) | TF | 0x202;
	kind = next(&n);
	r[REG_EFL] |= (kind & 3 ? 0 : AC) | (kind & 12 ? 0 : NT) | (kind & 48 ? 0 : RF);
	r[REG_CSGSFS] = (r[REG_CSGSFS] & ~0xFFFFL) | (is_64_bits ? 0x33 : 0x23);
	memcpy(context->uc_mcontext.fpregs, first_state, 416);
	clear_rest((unsigned char *)context->uc_mcontext.fpregs);
	/* The return from a signal keeps NT and ID as they are. The signal's handler sets them last. */
	run->before = kind >> 8 & 7 ? 0 : ID;
	run->before |= r[REG_EFL] & NT;
	run->instruction = (unsigned long)at;
	if (run->way == UNSTEPPED) {
		memset(at + run->length, 0xCC, CODE + PAGE - at - run->length);
		r[REG_EFL] &= ~TF;
	}
	if (!(kind >> 12 & 3))
		signal_this();
}

static void leave(int status)
{
	asm volatile("syscall" : : "a"(231L), "D"((long)status) : "rcx", "r11", "memory");
	__builtin_unreachable();
}

static void say(const char *text, long length)
{
	long result = 1;

	asm volatile("syscall" : "+a"(result) : "D"(1L), "S"(text), "d"(length) : "rcx", "r11", "memory");
}

static void hex(unsigned long value, char end)
{
	char text[18];
	int at = 17;

	text[at] = end;
	do
		text[--at] = "0123456789abcdef"[value & 15];
	while (value >>= 4);
	say(text + at, 18 - at);
}

static void show_case(int signo, siginfo_t *info, greg_t *r, unsigned long memory, unsigned long floats)
{
	say("odd: ", 5);
	hex(run->at, ' ');
	hex(run->way, ' ');
	for (int i = 0; i < 15; i++)
		hex(run->bytes[i], ' ');
	hex(signo, ' ');
	hex(info->si_code, ' ');
	hex(r[REG_TRAPNO], ' ');
	hex(r[REG_ERR], ' ');
	hex(r[REG_TRAPNO] == 14 ? r[REG_CR2] : 0, ' ');
	for (int i = 0; i <= REG_EFL; i++)
		hex(r[i], ' ');
	hex(r[REG_CSGSFS], ' ');
	hex(memory, ' ');
	hex(floats, '\n');
}

/* Adds all registers, and the memory that cases use, to the sum. */
static void record(int signo, siginfo_t *info, ucontext_t *all)
{
	greg_t *r = all->uc_mcontext.gregs;
	unsigned char *state = (unsigned char *)all->uc_mcontext.fpregs;
	unsigned long sum = add(add(add(signo, info->si_code), r[REG_TRAPNO]), run->way), memory = 0, floats = 0;

	/* RF at a step within a repeated instruction tells whether an interrupt came there before. */
	if (r[REG_TRAPNO] == 1)
		r[REG_EFL] &= ~0x10000L;
	sum = add(sum, r[REG_ERR]);
	sum = add(sum, r[REG_TRAPNO] == 14 ? r[REG_CR2] : 0);
	for (int i = 0; i <= REG_EFL; i++)
		sum = add(sum, r[i]);
	sum = add(sum, r[REG_CSGSFS]);
	for (int i = 0; i < DATA_SIZE; i += 8)
		memory = add(memory, *(unsigned long *)(DATA + i));
	for (int i = 24; i < 416; i += 8)
		floats = add(floats, *(unsigned long *)(state + i));
	floats = add(floats, *(unsigned int *)state);
	run->sum = add(add(add(run->sum, sum), memory), floats);
	if (run->shows)
		show_case(signo, info, r, memory, floats);
}

static void skip_left_out(void)
{
	while (run->at < run->end && run->left_out[run->at])
		run->at++;
}

/* Goes on to the next case, or to the same one without a step if the length of its instruction is known now. */
static void advance(greg_t *r)
{
	unsigned long length = r[REG_RIP] - run->instruction;

	if (run->way == STEPPED && r[REG_TRAPNO] == 1 && length - 1 < 15) {
		run->length = length;
		run->way = UNSTEPPED;
		return;
	}
	run->way = STEPPED;
	run->at++;
	skip_left_out();
	if (run->at == run->end)
		leave(0);
}

/* Records the result of a case, and begins the next one. Uses no thread-local data: FS and GS have the case's bases. */
static void result(int signo, siginfo_t *info, void *context)
{
	ucontext_t *all = context;
	greg_t *r = all->uc_mcontext.gregs;

	/* A signal does not change these flags. */
	set_flags(0);
	if (!has_state) {
		memcpy(first_state, all->uc_mcontext.fpregs, 416);
		has_state = 1;
		prepare(all);
	} else if (signo == SIGUSR1) {
		/* Before the case's instruction: all is as it was prepared. */
		r[REG_TRAPNO] = r[REG_ERR] = 0;
		record(signo, info, all);
	} else {
		record(signo, info, all);
		if (r[REG_TRAPNO] == 14)
			note_case_apart(r[REG_CR2]);
		/* A step that ends there shows what is there. */
		note_case_apart(r[REG_RIP]);
		advance(r);
		prepare(all);
	}
	set_flags(run->before);
}

/*
 * Unmaps the stack, and the mappings of the kernel that are about as high as the vDSO. Natively they are where a hosted machine
 * has no addresses for programs. Begins the cases. Their signals have a stack of their own.
 */
static void begin_cases(void)
{
	const unsigned long last = getauxval(AT_EXECFN), vdso = getauxval(AT_SYSINFO_EHDR), most = 64 << 20;
	const unsigned long top = (last & -PAGE) + PAGE;

	asm volatile("mov $11, %%eax; syscall\n"
		     "mov $11, %%eax; mov %0, %%rdi; mov %1, %%rsi; syscall\n"
		     "wrfsbase %2; wrgsbase %2; ud2"
		     :
		     : "r"(top - most), "r"(most), "r"(0x10100800L), "D"(vdso - (vdso ? 0x10000 : 0)), "S"(vdso ? 0x20000L : PAGE)
		     : "rax", "rcx", "r11");
	__builtin_unreachable();
}

/* Runs all cases in children, since a child may end at any case. */
static void go_through(void)
{
	for (;;) {
		int status;
		pid_t child;

		/* The first case, and the one after the end of a child, may be left out. */
		skip_left_out();
		if (run->at == run->end)
			return;
		fflush(stdout);
		child = fork();
		if (child == 0) {
			catch_all(result);
			alarm(1200);
			begin_cases();
		}
		waitpid(child, &status, 0);
		if (status) {
			run->sum = add(run->sum, status);
			printf("odd: ended by case %lu of %lu: %#x\n", run->at, run->seed, status);
			run->way = STEPPED;
			run->at++;
		}
	}
}

static void set_up(unsigned long seed, unsigned long first)
{
	struct number n = { 0x123456789ABCDEF };
	const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED;

	run = shared(sizeof(*run));
	mmap(CODE, PAGE, PROT_READ | PROT_WRITE | PROT_EXEC, flags, -1, 0);
	mmap(DATA, DATA_SIZE, PROT_READ | PROT_WRITE, flags, -1, 0);
	for (int i = 0; i < DATA_SIZE; i += 8)
		*(unsigned long *)(pristine + i) = i & 64 ? any_value(&n) : next(&n);
	run->seed = seed;
	run->at = first;
}

/*
 * Random changes of mappings, with an access across or at a border after each. The map is small, so that ranges touch and
 * split one another.
 */
#define MAP ((unsigned char *)0x20000000)
#define MAP_PAGES 24
#define RETURN 0xC3

static sigjmp_buf back;
static volatile unsigned long fault;

static void note_fault(int signo, siginfo_t *info, void *context)
{
	greg_t *r = ((ucontext_t *)context)->uc_mcontext.gregs;

	fault = add(add(add(signo, info->si_code), r[REG_TRAPNO]), r[REG_ERR]);
	if (r[REG_TRAPNO] == 14)
		fault = add(fault, r[REG_CR2]);
	siglongjmp(back, 1);
}

/* Makes one access; returns what it has read, or the fault. */
static unsigned long access_at(unsigned char *at, unsigned int how)
{
	volatile unsigned long *word = (unsigned long *)at;

	fault = 0;
	if (sigsetjmp(back, 1))
		return fault;
	switch (how % 4) {
	case 0:
		return *word;
	case 1:
		*word = 0x0101010101010101UL * RETURN;
		return 1;
	case 2:
		*word = *word;
		return 4;
	default:
		/* Only where a return is, as far as it can be read. */
		if (*at != RETURN)
			return 2;
		((void (*)(void))at)();
		return 3;
	}
}

/* mremap() and madvise() are left out: what they refuse depends on the kernel's version, and on its configuration. */
static unsigned long change(unsigned char *at, size_t length, struct number *n)
{
	static const int protections[] = { PROT_NONE, PROT_READ, PROT_READ | PROT_WRITE, PROT_READ | PROT_EXEC,
					   PROT_READ | PROT_WRITE | PROT_EXEC };
	const int protection = protections[next(n) % 5], flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED;
	void *got;

	switch (next(n) % 8) {
	case 0: case 1:
		got = mmap(at, length, protection, flags, -1, 0);
		break;
	case 2:
		got = mmap(at, length, protection, flags | MAP_FIXED_NOREPLACE, -1, 0);
		break;
	case 3:
		return munmap(at, length) ? errno : 0;
	default:
		return mprotect(at, length, protection) ? errno : 0;
	}
	return got == MAP_FAILED ? errno : (unsigned long)got;
}

static void maps(unsigned long seed, unsigned long count)
{
	struct number n = { 0x123456789ABCDEF ^ seed << 20 };
	unsigned long sum = 0;

	munmap(MAP, 2 * MAP_PAGES * PAGE);
	catch_all(note_fault);
	for (unsigned long i = 1; i <= count; i++) {
		unsigned long page = next(&n) % MAP_PAGES, border = 1 + next(&n) % MAP_PAGES;

		sum = add(sum, change(MAP + page * PAGE, (1 + next(&n) % 5) * PAGE, &n));
		sum = add(sum, access_at(MAP + border * PAGE - next(&n) % 16, next(&n)));
		if (i % 1000 == 0 || i == count)
			printf("odd: maps %lu %lu: %lx\n", seed, i, sum);
	}
	munmap(MAP, 2 * MAP_PAGES * PAGE);
}

/* Changes mappings in a child: the kernel reports each fault of its first process on the console, in the middle of a line. */
static void maps_in_child(unsigned long seed, unsigned long count)
{
	int status;
	pid_t child;

	fflush(stdout);
	child = fork();
	if (!child) {
		maps(seed, count);
		fflush(stdout);
		_exit(0);
	}
	waitpid(child, &status, 0);
	if (status)
		printf("odd: maps ended: %#x\n", status);
}

static void leave_out(const char *list)
{
	FILE *file = fopen(list, "r");
	unsigned long number;

	while (file && fscanf(file, "%lu", &number) == 1)
		if (number < MOST_CASES)
			run->left_out[number] = 1;
	if (file)
		fclose(file);
}

static int stress(unsigned long seed, unsigned long count, const char *list)
{
	if (count > MOST_CASES)
		return 1;
	set_up(seed, 0);
	/* The machine appends its own options to the kernel's command line. They arrive here as further arguments. */
	if (list && list[0] == '/')
		leave_out(list);
	while (run->at < count) {
		run->end = run->at + 100 < count ? run->at + 100 : count;
		go_through();
		printf("odd: %lu %lu: %lx\n", seed, run->at, run->sum);
	}
	maps_in_child(seed, count);
	for (unsigned long i = 0; i < count; i++)
		if (run->apart[i])
			printf("apart: %c %lu\n", run->apart[i], i);
	return 0;
}

static int show(unsigned long seed, unsigned long first, unsigned long count, const char *list)
{
	set_up(seed, first);
	if (list && list[0] == '/')
		leave_out(list);
	run->shows = 1;
	while (run->at < first + count) {
		/* A child for each hundred cases, as in stress(). */
		run->end = run->at - run->at % 100 + 100 < first + count ? run->at - run->at % 100 + 100 : first + count;
		go_through();
		printf("odd: %lu %lu: %lx\n", seed, run->at, run->sum);
	}
	return 0;
}

int main(int count, char **words)
{
	int hosted = count > 1 && !strcmp(words[1], "hosted");

	seen = shared(4096);
	setvbuf(stdout, NULL, _IOLBF, 0);
	if (count > 3 && !strcmp(words[1], "stress"))
		return stress(strtoul(words[2], NULL, 0), strtoul(words[3], NULL, 0), count > 4 ? words[4] : NULL);
	if (count > 1 && !strcmp(words[1], "selectors")) {
		shows_loads = 1;
		selectors();
		return 0;
	}
	if (count > 1 && !strcmp(words[1], "breakpoints")) {
		breakpoints(1);
		return 0;
	}
	if (count > 1 && !strcmp(words[1], "segments"))
		return segments();
	if (count > 4 && !strcmp(words[1], "show"))
		return show(strtoul(words[2], NULL, 0), strtoul(words[3], NULL, 0), strtoul(words[4], NULL, 0), count > 5 ? words[5] : NULL);
	checks(hosted);
	maps_in_child(1, 3000);
	printf("odd: checked\n");
	return 0;
}
