// SPDX-License-Identifier: GPL-2.0-only
/*
 * Flips of random bits, by a seed: the faults of the campaign (`lab campaign`). Each command says on the
 * console what it flips, before it does so.
 */
#include <linux/kprobes.h>
#include <linux/memory_hotplug.h>
#include <linux/mm.h>
#include <linux/moduleparam.h>
#include <linux/prandom.h>
#include <linux/sched/signal.h>
#include <linux/sched/task_stack.h>
#include <linux/vmalloc.h>
#include <asm/pgtable.h>

#include "mercury_test.h"

/* Functions that a machine at work calls all the time. A kernel lacks some of them. */
static const char * const hot[] = {
	"vfs_read", "vfs_write", "do_syscall_64", "schedule", "__schedule", "pick_next_task_fair",
	"enqueue_task_fair", "dequeue_task_fair", "update_curr", "try_to_wake_up", "__alloc_pages",
	"__alloc_pages_noprof", "get_page_from_freelist", "rmqueue_bulk", "free_unref_page", "kmem_cache_alloc",
	"kmem_cache_alloc_noprof", "kmem_cache_free", "kfree", "__kmalloc", "__kmalloc_noprof", "handle_mm_fault",
	"unmap_page_range", "copy_page_range", "filemap_fault", "filemap_read", "filemap_map_pages", "do_mmap",
	"mas_walk", "vma_interval_tree_insert", "copy_process", "do_exit", "release_task", "wait_task_zombie",
	"do_wait", "load_elf_binary", "begin_new_exec", "do_sys_openat2", "path_openat", "link_path_walk",
	"lookup_fast", "step_into", "dput", "__d_lookup_rcu", "inode_permission", "generic_permission", "fput",
	"__fget_light", "pipe_read", "pipe_write", "submit_bio", "blk_mq_submit_bio", "blk_mq_dispatch_rq_list",
	"hrtimer_interrupt", "run_timer_softirq", "rcu_core", "__do_softirq", "do_epoll_wait", "tcp_sendmsg",
	"tcp_recvmsg", "ip_rcv", "__dev_queue_xmit",
};

static struct rnd_state random;

static u32 below(u32 end)
{
	return prandom_u32_state(&random) % end;
}

/* Returns a function of the kernel that is not exported: the address at which a probe of it would be. */
static unsigned long find(const char *name)
{
	struct kprobe probe = { .symbol_name = name };
	unsigned long address;

	if (register_kprobe(&probe))
		return 0;
	address = (unsigned long)probe.addr;
	unregister_kprobe(&probe);
	return address;
}

/* Returns a symbol of the kernel, or 0. */
static unsigned long symbol(const char *name)
{
	static unsigned long (*lookup)(const char *name);

	if (!lookup)
		lookup = (void *)find("kallsyms_lookup_name");
	return lookup ? lookup(name) : 0;
}

static unsigned long hot_function(void)
{
	unsigned long address = 0;
	unsigned int tries = 0;

	while (!address && tries++ < 1000)
		address = symbol(hot[below(ARRAY_SIZE(hot))]);
	return address;
}

/* Returns the page beneath an address of the kernel's image. */
static struct page *page_of(unsigned long address)
{
	static phys_addr_t (*walk)(void *address);

	if (!walk)
		walk = (void *)find("slow_virt_to_phys");
	return walk ? pfn_to_page(PHYS_PFN(walk((void *)address))) : NULL;
}

/* Flips a bit of the kernel's image through another mapping, since the kernel's own may be read-only. */
static int flip_in_image(const char *what, unsigned long address)
{
	struct page *page = page_of(address);
	unsigned int bit = below(8);
	u8 *alias;

	if (!page)
		return -ENOENT;
	alias = vmap(&page, 1, VM_MAP, PAGE_KERNEL);
	if (!alias)
		return -ENOMEM;
	pr_emerg("mercury_test: flips bit %u of %s at %pS\n", bit, what, (void *)address);
	alias[offset_in_page(address)] ^= BIT(bit);
	vunmap(alias);
	return 0;
}

/* flip-code SEED: a bit of an instruction in a function that is called all the time */
int test_flip_code(struct test_answer *answer, const u64 *arguments)
{
	bool (*bounds)(unsigned long address, unsigned long *size, unsigned long *offset);
	unsigned long address, size = 0, offset = 0;

	prandom_seed_state(&random, arguments[0]);
	address = hot_function();
	bounds = (void *)symbol("kallsyms_lookup_size_offset");
	if (!address || !bounds || !bounds(address, &size, &offset) || !size)
		return -ENOENT;
	return flip_in_image("code", address + below(size));
}

/* flip-data SEED COUNT: bits of the kernel's writable data */
int test_flip_data(struct test_answer *answer, const u64 *arguments)
{
	unsigned long start = symbol("_sdata"), end = symbol("_edata");
	u64 count;
	int err = 0;

	if (!start || end <= start)
		return -ENOENT;
	prandom_seed_state(&random, arguments[0]);
	for (count = arguments[1]; count && !err; count--)
		err = flip_in_image("data", start + below(end - start));
	return err;
}

/* Returns a page of slab by chance, or none. */
static struct page *slab_page(void)
{
	unsigned long end = totalram_pages() + (totalram_pages() >> 2);
	unsigned int tries;
	struct page *page;

	for (tries = 0; tries < 200000; tries++) {
		page = pfn_to_online_page(below(end));
		if (page && !PageReserved(page) && PageSlab(compound_head(page)))
			return page;
	}
	return NULL;
}

/* flip-slab SEED COUNT: bits of objects, or of free ones, in the slab allocator's pages */
int test_flip_slab(struct test_answer *answer, const u64 *arguments)
{
	struct page *page;
	unsigned int at;
	u64 count;

	prandom_seed_state(&random, arguments[0]);
	for (count = arguments[1]; count; count--) {
		page = slab_page();
		if (!page)
			return -ENOENT;
		at = below(PAGE_SIZE);
		pr_emerg("mercury_test: flips a bit of slab at %#lx+%#x\n", page_to_pfn(page), at);
		((u8 *)page_address(page))[at] ^= BIT(below(8));
	}
	return 0;
}

/* Returns a task by chance, which the caller has to put. With `memory` it is one of a process. */
static struct task_struct *random_task(bool memory)
{
	struct task_struct *task, *found = NULL;
	unsigned int number = 0;

	rcu_read_lock();
	for_each_process(task) {
		if (task == current || (memory && !task->mm))
			continue;
		/* Each task so far is the one with the same probability. */
		if (!below(++number))
			found = task;
	}
	if (found)
		get_task_struct(found);
	rcu_read_unlock();
	return found;
}

/* flip-stack SEED COUNT: bits of a task's kernel stack, in the part that is in use */
int test_flip_stack(struct test_answer *answer, const u64 *arguments)
{
	struct task_struct *task;
	unsigned long top, sp;
	unsigned int at;
	u64 count;

	prandom_seed_state(&random, arguments[0]);
	task = random_task(false);
	/* A task that has ended may have no stack any more. */
	if (!task || !task_stack_page(task))
		return -ESRCH;
	top = (unsigned long)task_stack_page(task) + THREAD_SIZE;
	sp = READ_ONCE(task->thread.sp);
	for (count = arguments[1]; count && sp < top && top - sp <= THREAD_SIZE; count--) {
		at = below(top - sp);
		pr_emerg("mercury_test: flips a bit of the stack of %s at +%#x\n", task->comm, at);
		*(u8 *)(sp + at) ^= BIT(below(8));
	}
	put_task_struct(task);
	return 0;
}

/* Returns a present entry of a table by chance. */
static u64 *random_entry(u64 *table)
{
	unsigned int start = below(PTRS_PER_PTE), i;

	for (i = 0; i < PTRS_PER_PTE; i++) {
		u64 *entry = &table[(start + i) % PTRS_PER_PTE];

		if (READ_ONCE(*entry) & _PAGE_PRESENT)
			return entry;
	}
	return NULL;
}

/* flip-page-table SEED: a bit of an entry, of any level, in the page tables of a process or of the kernel */
int test_flip_page_table(struct test_answer *answer, const u64 *arguments)
{
	struct task_struct *task;
	unsigned int depth, level, bit;
	u64 *table, *entry = NULL;

	prandom_seed_state(&random, arguments[0]);
	task = random_task(true);
	if (!task)
		return -ESRCH;
	depth = below(4);
	table = task->mm ? (u64 *)task->mm->pgd : NULL;
	for (level = 0; table && level <= depth; level++) {
		u64 *next = random_entry(table);

		if (!next)
			break;
		entry = next;
		/* A large page has no table. */
		table = level && (*entry & _PAGE_PSE) ? NULL : __va(*entry & PTE_PFN_MASK);
	}
	if (entry) {
		bit = below(64);
		pr_emerg("mercury_test: flips bit %u of an entry of level %u of %s\n", bit, 5 - level, task->comm);
		*entry ^= BIT_ULL(bit);
	}
	put_task_struct(task);
	return entry ? 0 : -ENOENT;
}

static atomic_t registers_left = ATOMIC_INIT(0);

/* True until a flip of a register has struck, for the campaign. */
static bool pending;
module_param(pending, bool, 0444);

/* Flips a bit of one of the sixteen general registers, once. */
static int flip_register(struct kprobe *probe, struct pt_regs *regs)
{
	unsigned int number = below(16);
	unsigned long *word = number == 15 ? &regs->sp : &regs->r15 + number;

	if (atomic_dec_if_positive(&registers_left) >= 0) {
		*word ^= BIT(below(64));
		WRITE_ONCE(pending, false);
	}
	return 0;
}

static struct kprobe registers = { .pre_handler = flip_register };

/* flip-register SEED: a bit of a register, when a function is called the next time */
int test_flip_register(struct test_answer *answer, const u64 *arguments)
{
	int err;

	if (registers.addr)
		return -EBUSY;
	prandom_seed_state(&random, arguments[0]);
	registers.addr = (void *)hot_function();
	atomic_set(&registers_left, 1);
	pending = true;
	pr_emerg("mercury_test: flips a bit of a register in %pS\n", registers.addr);
	err = register_kprobe(&registers);
	if (err) {
		registers.addr = NULL;
		pending = false;
	}
	return err;
}

void test_flip_exit(void)
{
	if (registers.addr)
		unregister_kprobe(&registers);
}
