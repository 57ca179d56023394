// SPDX-License-Identifier: GPL-2.0-only
/*
 * The hypervisor's memory.
 *
 * Owned memory is a few physically contiguous chunks, as large as can be had. The image, an area for each
 * possible CPU and page tables are carved from them. The rest becomes the pool of pages for nested tables.
 * Attached CPUs see none of it. It comes from the page allocator's unmovable blocks and is marked reserved,
 * so that the kernel neither migrates nor offlines it.
 *
 * Shared blocks are not owned. They are ordinary pages with a reference each, so that a process that has
 * mapped them keeps them beyond unload.
 */
#define pr_fmt(fmt) "mercury: " fmt

#include <linux/gfp.h>
#include <linux/log2.h>
#include <linux/mm.h>
#include <linux/slab.h>
#include <linux/vmalloc.h>
#include <asm/io.h>
#include <asm/special_insns.h>

#include "attach.h"

#define CHUNK_ORDER_MAX	9
#define CHUNKS_MAX	(PAGE_SIZE / sizeof(struct mercury_owned_range))
/* Pages for nested tables to begin with, and the most that there can be. */
#define POOL_INITIAL	64
#define POOL_MAX	(2 * PAGE_SIZE / sizeof(u64))
/* The hypervisor's own page tables, for the estimate. */
#define TABLES_ESTIMATE	16
#define SHARED_PAGES	(MERCURY_SHARED_CPU_SIZE / PAGE_SIZE)
#define GFP_CHUNK	(GFP_KERNEL | __GFP_ZERO | __GFP_NOWARN | __GFP_RETRY_MAYFAIL)

/* The first owned pages: the arguments of the hypervisor's start. */
struct info {
	struct mercury_boot_info boot;
	u8 pad1[MERCURY_BOOT_INFO_FACTS - sizeof(struct mercury_boot_info)];
	struct mercury_cpu_facts facts;
	u8 pad2[PAGE_SIZE - MERCURY_BOOT_INFO_FACTS - sizeof(struct mercury_cpu_facts)];
	struct mercury_owned_range owned[CHUNKS_MAX];
	u64 pool[POOL_MAX];
};

#define INFO_PAGES	(sizeof(struct info) / PAGE_SIZE)
static_assert(sizeof(struct info) % PAGE_SIZE == 0);

struct chunk {
	struct page *page;
	unsigned int order;
	/* Pages carved from its start. */
	unsigned int used;
};

static struct chunk *chunks;
static unsigned int chunk_count;
/* An estimate of the pages that are still to be carved: the size of the next chunk. */
static unsigned long remaining;
static struct info *info;
/* The first page of each CPU's shared block. The lock is for mmap, and for writers to all blocks. */
static struct page **shared;
static DEFINE_MUTEX(shared_lock);

/* Returns the arguments of the hypervisor's start; NULL: it is not loaded. */
struct mercury_boot_info *mercury_boot_info(void)
{
	return info ? &info->boot : NULL;
}

struct mercury_cpu_facts *mercury_preflight_facts(void)
{
	return &info->facts;
}

/* Maps shared blocks into a process, which gets references of its own. */
int mercury_shared_map(struct vm_area_struct *vma)
{
	unsigned long addr, index = vma->vm_pgoff;
	int err = -ENXIO;

	mutex_lock(&shared_lock);
	for (addr = vma->vm_start; shared && addr < vma->vm_end; addr += PAGE_SIZE, index++) {
		struct page *first = NULL;

		if (index / SHARED_PAGES < nr_cpu_ids)
			first = shared[index / SHARED_PAGES];
		err = first ? vm_insert_page(vma, addr, first + index % SHARED_PAGES) : -ENXIO;
		if (err)
			break;
	}
	mutex_unlock(&shared_lock);
	return err;
}

/*
 * Adds a chunk from which `pages` can be carved: as large as can be had, and no larger than is needed. What
 * it lacks comes in smaller ones, so that rounding up does not double the whole.
 */
static struct chunk *add_chunk(unsigned int pages)
{
	int least = get_order(pages << PAGE_SHIFT);
	int order = max(min(ilog2(remaining | 1), CHUNK_ORDER_MAX), least);
	struct chunk *chunk = &chunks[chunk_count];
	unsigned int i;

	if (chunk_count == CHUNKS_MAX)
		return NULL;
	for (chunk->page = NULL; order >= least && !chunk->page; order--) {
		chunk->page = alloc_pages(GFP_CHUNK, order);
		chunk->order = order;
	}
	if (!chunk->page)
		return NULL;
	for (i = 0; i < 1U << chunk->order; i++)
		SetPageReserved(chunk->page + i);
	chunk->used = 0;
	chunk_count++;
	return chunk;
}

/* Owned, zeroed, contiguous pages, aligned to `align` pages; NULL if there are none. */
void *mercury_carve(unsigned int pages, unsigned int align)
{
	struct chunk *chunk;
	unsigned int start;

	if (pages > 1 && mercury_fault(MERCURY_FAULT_POINT_LOAD_CONTIGUOUS))
		return NULL;
	for (chunk = chunks; ; chunk++) {
		if (chunk == chunks + chunk_count) {
			chunk = add_chunk(pages);
			if (!chunk)
				return NULL;
		}
		start = ALIGN(chunk->used, align);
		if (start + pages <= 1U << chunk->order)
			break;
	}
	remaining -= min_t(unsigned long, remaining, pages + start - chunk->used);
	chunk->used = start + pages;
	return page_address(chunk->page + start);
}

/* The owned range with this number; false if there is none. On an attached CPU `info` cannot be read. */
bool mercury_owned(unsigned int number, struct mercury_owned_range *range)
{
	if (number >= chunk_count)
		return false;
	range->start_phys = page_to_phys(chunks[number].page);
	range->pages = 1UL << chunks[number].order;
	return true;
}

/* Publishes all chunks, for the hypervisor and for the status. */
static void publish_owned(void)
{
	u64 pages = 0;
	unsigned int i;

	for (i = 0; i < chunk_count; i++) {
		mercury_owned(i, &info->owned[i]);
		pages += info->owned[i].pages;
	}
	info->boot.owned_count = chunk_count;
	mercury.memory_per_cpu = MERCURY_AREA_SIZE + MERCURY_SHARED_CPU_SIZE;
	mercury.memory_fixed = pages * PAGE_SIZE - num_possible_cpus() * MERCURY_AREA_SIZE;
}

static u32 pool_add(void)
{
	void *page = info->boot.pool_count < POOL_MAX ? mercury_carve(1, 1) : NULL;
	u32 code;

	if (!page)
		return MERCURY_CODE_NO_MEMORY;
	code = mercury_map_owned(page, 1, MERCURY_MAP_DATA);
	if (code == MERCURY_CODE_OK)
		info->pool[info->boot.pool_count++] = virt_to_phys(page);
	return code;
}

/* Adds pages to the pool of nested tables. */
u32 mercury_memory_donate(u64 pages)
{
	u32 code = MERCURY_CODE_OK;

	if (pages > POOL_MAX - info->boot.pool_count)
		return MERCURY_CODE_NO_MEMORY;
	remaining = max_t(unsigned long, remaining, pages);
	while (pages-- && code == MERCURY_CODE_OK)
		code = pool_add();
	publish_owned();
	return code;
}

/* Gives the pool whatever the chunks still hold, but keeps enough to map it. */
static u32 pool_fill(void)
{
	unsigned int i;
	u32 code;

	for (i = 0; i < chunk_count; i++) {
		while (chunks[i].used + 2 < 1U << chunks[i].order &&
		       info->boot.pool_count < POOL_MAX) {
			code = pool_add();
			if (code != MERCURY_CODE_OK)
				return code;
		}
	}
	return MERCURY_CODE_OK;
}

static u32 place_image(void **image)
{
	const struct mercury_image_header *header = mercury_image_header();
	unsigned long text = header->text_end / PAGE_SIZE;
	unsigned long rodata = header->rodata_end / PAGE_SIZE - text;

	*image = mercury_carve(mercury_image_pages(), 1);
	if (!*image)
		return MERCURY_CODE_NO_CONTIGUOUS_MEMORY;
	return mercury_image_place(*image) ?:
	       mercury_map_owned(*image, text, MERCURY_MAP_TEXT) ?:
	       mercury_map_owned(*image + header->text_end, rodata, MERCURY_MAP_RODATA) ?:
	       mercury_map_owned(*image + header->rodata_end,
				 mercury_image_pages() - text - rodata, MERCURY_MAP_DATA);
}

static u32 place_info(void *image)
{
	info = mercury_carve(INFO_PAGES, 1);
	if (!info)
		return MERCURY_CODE_NO_CONTIGUOUS_MEMORY;
	info->boot.abi_version = MERCURY_ABI_VERSION;
	info->boot.five_level = !!(native_read_cr4() & X86_CR4_LA57);
	info->boot.direct_map_virt = PAGE_OFFSET;
	info->boot.image_virt = (u64)image;
	info->boot.owned_virt = (u64)info->owned;
	info->boot.pool_virt = (u64)info->pool;
	info->boot.iomem_end_phys = mercury.iomem_end + 1;
	return mercury_map_owned(info, INFO_PAGES, MERCURY_MAP_DATA);
}

/* Allocates one CPU's shared block: ordinary pages, each with its own reference. */
static u32 place_shared(int cpu)
{
	struct mercury_cpu *m = mercury_cpu(cpu);
	int order = order_base_2(SHARED_PAGES);
	struct page *page;

	if (mercury_fault(MERCURY_FAULT_POINT_LOAD_MEMORY))
		return MERCURY_CODE_NO_MEMORY;
	page = alloc_pages(GFP_CHUNK, order);
	if (!page)
		return MERCURY_CODE_NO_MEMORY;
	split_page(page, order);
	mutex_lock(&shared_lock);
	shared[cpu] = page;
	m->shared = page_address(page);
	m->shared->kvm_may = READ_ONCE(mercury.kvm_may);
	mutex_unlock(&shared_lock);
	return mercury_map_owned(m->shared, 1UL << order, MERCURY_MAP_DATA);
}

/*
 * Tells the hypervisor whether KVM may use the hardware. In a crash, and after the machine was put back, no
 * task may wait; shared blocks stay allocated then. All other callers use mercury_kvm_allow().
 */
void mercury_kvm_allow_now(bool may)
{
	int cpu;

	WRITE_ONCE(mercury.kvm_may, may);
	for_each_possible_cpu(cpu) {
		struct mercury_shared_cpu *block = READ_ONCE(mercury_cpu(cpu)->shared);

		if (block)
			WRITE_ONCE(block->kvm_may, may);
	}
}

/* Does the same, and waits for shared blocks that are being made or freed. */
void mercury_kvm_allow(bool may)
{
	mutex_lock(&shared_lock);
	mercury_kvm_allow_now(may);
	mutex_unlock(&shared_lock);
}

/* Allocates one CPU's area. The page that only the processor uses stays unmapped and guards the stack. */
static u32 place_area(int cpu, void *image)
{
	struct mercury_cpu *m = mercury_cpu(cpu);
	struct mercury_gate_block *gate = mercury_carve(MERCURY_AREA_PAGES, MERCURY_AREA_PAGES);

	if (!gate)
		return MERCURY_CODE_NO_CONTIGUOUS_MEMORY;
	gate->host_cr3 = mercury_tables_cr3();
	gate->host_cr4 = mercury_tables_cr4();
	gate->entry_virt = (u64)image + mercury_image_header()->entry_offsets[mercury_vendor->number];
	gate->leave_virt = (u64)mercury_vendor->leave;
	gate->area_phys = virt_to_phys(gate);
	gate->shared_virt = (u64)m->shared;
	gate->cpu = cpu;
	if (mercury_vendor->place)
		mercury_vendor->place(gate);
	m->gate = gate;
	return mercury_map_window(gate) ?:
	       mercury_map_owned(gate, MERCURY_AREA_PAGE_PROCESSOR, MERCURY_MAP_DATA) ?:
	       mercury_map_owned((void *)gate + MERCURY_AREA_PAGE_STACK * PAGE_SIZE,
				 MERCURY_AREA_PAGES - MERCURY_AREA_PAGE_STACK, MERCURY_MAP_DATA);
}

static u32 map_gate(void)
{
	void *page = (void *)((unsigned long)mercury_vendor->gate & PAGE_MASK);

	return mercury_map(page, page_to_phys(vmalloc_to_page(page)), 1, MERCURY_MAP_TEXT);
}

/* All that the hypervisor needs at the start. After a failure the caller destroys what is there. */
u32 mercury_memory_create(void)
{
	void *image;
	u32 code;
	int cpu;

	chunks = kcalloc(CHUNKS_MAX, sizeof(*chunks), GFP_KERNEL);
	mutex_lock(&shared_lock);
	shared = kcalloc(nr_cpu_ids, sizeof(*shared), GFP_KERNEL);
	mutex_unlock(&shared_lock);
	if (!chunks || !shared)
		return MERCURY_CODE_NO_MEMORY;
	remaining = mercury_image_pages() + INFO_PAGES + POOL_INITIAL + TABLES_ESTIMATE +
		    MERCURY_AREA_PAGES * num_possible_cpus();
	code = mercury_tables_create() ?: place_image(&image) ?: place_info(image);
	for_each_possible_cpu(cpu)
		code = code ?: place_shared(cpu) ?: place_area(cpu, image);
	return code ?: map_gate() ?: mercury_memory_donate(POOL_INITIAL) ?: pool_fill();
}

/* Logs the memory that reads as zeros in a dump that an attached CPU makes. */
void mercury_memory_report(void)
{
	unsigned int i;

	for (i = 0; i < chunk_count; i++) {
		phys_addr_t start = page_to_phys(chunks[i].page);
		phys_addr_t last = start + (PAGE_SIZE << chunks[i].order) - 1;

		pr_info("hypervisor memory [mem %pa-%pa]\n", &start, &last);
	}
}

static void free_shared(void)
{
	unsigned int i;
	int cpu;

	mutex_lock(&shared_lock);
	for_each_possible_cpu(cpu) {
		/* Forgotten first: a CPU that crashes now reads them. */
		mercury_cpu(cpu)->gate = NULL;
		WRITE_ONCE(mercury_cpu(cpu)->shared, NULL);
		for (i = 0; shared && shared[cpu] && i < SHARED_PAGES; i++)
			__free_page(shared[cpu] + i);
	}
	kfree(shared);
	shared = NULL;
	mutex_unlock(&shared_lock);
}

/* Every CPU must be native. There may be nothing, or a part of it. */
void mercury_memory_destroy(void)
{
	unsigned int i, page;

	free_shared();
	mercury_tables_destroy();
	for (i = 0; i < chunk_count; i++) {
		for (page = 0; page < 1U << chunks[i].order; page++)
			ClearPageReserved(chunks[i].page + page);
		__free_pages(chunks[i].page, chunks[i].order);
	}
	kfree(chunks);
	chunks = NULL;
	info = NULL;
	chunk_count = 0;
	mercury.memory_fixed = 0;
	mercury.memory_per_cpu = 0;
}
