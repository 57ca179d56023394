// SPDX-License-Identifier: GPL-2.0-only
/*
 * The hypervisor's own page tables. They map all that it can reach in 4 KiB pages, each at the address that
 * it has in the kernel, and are as deep as the kernel's tables. The table pages are owned but not mapped,
 * except for that of the windows: the hypervisor changes nothing else of its address space.
 *
 * For a snapshot there is a wide copy, which maps all of the system's memory as well, in 2 MiB pages where
 * nothing is mapped yet. A CPU loads the copy only while it needs that memory. The copy is made at load,
 * while the tables can be read: attached CPUs do not see them. It consists of ordinary pages, and stays
 * until unload, since processors may cache entries of it. The mappings of a snapshot are taken out after
 * it.
 */
#include <linux/gfp.h>
#include <linux/mm.h>
#include <asm/io.h>
#include <asm/msr.h>
#include <asm/pgtable_types.h>
#include <asm/special_insns.h>

#include "attach.h"

#define TABLE_FLAGS	(_PAGE_PRESENT | _PAGE_RW | _PAGE_ACCESSED)
#define DATA_FLAGS	(TABLE_FLAGS | _PAGE_DIRTY)
/* An entry that was made for a snapshot; processors ignore the bit. */
#define FOR_SNAPSHOT	_PAGE_SOFTW1
/* An entry whose table of windows both have. */
#define WINDOWS		_PAGE_SOFTW2
/* The hypervisor's windows: a page for each CPU, in the half of addresses where it has nothing else. */
#define WINDOWS_VIRT	0x600000000000UL

static u64 *root;
/* The root of the wide copy. */
static u64 *wide;

u32 mercury_tables_create(void)
{
	root = mercury_carve(1, 1);
	return root ? MERCURY_CODE_OK : MERCURY_CODE_NO_MEMORY;
}

u64 mercury_tables_cr3(void)
{
	return virt_to_phys(root);
}

/*
 * Built from scratch, not from the kernel's: nothing that the kernel turns on is on beneath it. MCE
 * stays as it is (clearing it would turn a machine check into a shutdown); LA57 cannot change.
 */
u64 mercury_tables_cr4(void)
{
	return X86_CR4_PAE | X86_CR4_OSFXSR | X86_CR4_OSXMMEXCPT | mercury_vendor->host_cr4 |
	       (native_read_cr4() & (X86_CR4_MCE | X86_CR4_LA57));
}

static int top_shift(void)
{
	return native_read_cr4() & X86_CR4_LA57 ? 48 : 39;
}

/* The entry for an address, of those that span 1 << last; tables on the way are made as needed. */
static u64 *entry_at(unsigned long virt, int last)
{
	int shift = top_shift();
	u64 *table = root;

	for (; shift > last; shift -= 9) {
		u64 *entry = table + ((virt >> shift) & 511);

		if (!*entry) {
			void *page = mercury_carve(1, 1);

			if (!page)
				return NULL;
			*entry = virt_to_phys(page) | TABLE_FLAGS;
		}
		table = phys_to_virt(*entry & PHYSICAL_PAGE_MASK);
	}
	return table + ((virt >> last) & 511);
}

/* Maps pages; kind is MERCURY_MAP_*. */
u32 mercury_map(void *virt, phys_addr_t phys, unsigned long pages, int kind)
{
	u64 flags = _PAGE_PRESENT | _PAGE_ACCESSED;
	unsigned long i;

	if (kind == MERCURY_MAP_DATA)
		flags |= _PAGE_RW | _PAGE_DIRTY;
	if (kind != MERCURY_MAP_TEXT && __rdmsr(MSR_EFER) & EFER_NX)
		flags |= _PAGE_NX;
	for (i = 0; i < pages; i++) {
		u64 *entry = entry_at((unsigned long)virt + i * PAGE_SIZE, PAGE_SHIFT);

		if (!entry)
			return MERCURY_CODE_NO_MEMORY;
		*entry = (phys + i * PAGE_SIZE) | flags;
	}
	return MERCURY_CODE_OK;
}

/* Maps owned memory at its direct-map address. */
u32 mercury_map_owned(void *virt, unsigned long pages, int kind)
{
	return mercury_map(virt, virt_to_phys(virt), pages, kind);
}

/* Maps a CPU's window. The hypervisor itself fills the entry, in a table that is mapped for that. */
u32 mercury_map_window(struct mercury_gate_block *gate)
{
	unsigned long virt = WINDOWS_VIRT + (unsigned long)gate->cpu * PAGE_SIZE;
	u64 *directory = entry_at(virt, PMD_SHIFT), *entry = entry_at(virt, PAGE_SHIFT);

	if (!directory || !entry)
		return MERCURY_CODE_NO_MEMORY;
	*directory |= WINDOWS;
	gate->window_virt = virt;
	gate->window_entry_virt = (u64)entry;
	return mercury_map_owned((void *)((unsigned long)entry & PAGE_MASK), 1, MERCURY_MAP_DATA);
}

/* The table that an entry leads to, made if there is none. */
static u64 *table_below(u64 *entry)
{
	if (!*entry) {
		unsigned long page = get_zeroed_page(GFP_KERNEL);

		if (!page)
			return NULL;
		*entry = __pa(page) | TABLE_FLAGS | FOR_SNAPSHOT;
	}
	return phys_to_virt(*entry & PHYSICAL_PAGE_MASK);
}

/* The copy's entry for an address, in the tables whose entries span 1 << shift; made if there are none. */
static u64 *wide_entry(unsigned long virt, int shift)
{
	u64 *table = wide;
	int level;

	for (level = top_shift(); table && level > shift; level -= 9)
		table = table_below(table + ((virt >> level) & 511));
	return table ? table + ((virt >> shift) & 511) : NULL;
}

static u64 wide_flags(void)
{
	return DATA_FLAGS | FOR_SNAPSHOT | (__rdmsr(MSR_EFER) & EFER_NX ? _PAGE_NX : 0);
}

/*
 * Returns how the kernel caches a page of memory, as bits of a 4 KiB entry: some drivers have pages of
 * theirs write-combining or uncached, in the direct map too. The hypervisor has the kernel's PAT, so that
 * the bits mean the same there.
 */
static u64 caching(unsigned long virt, unsigned int *level)
{
	const pte_t *pte = lookup_address(virt, level);

	if (!pte)
		return 0;
	if (*level == PG_LEVEL_4K)
		return pte_flags(*pte) & _PAGE_CACHE_MASK;
	return pgprot_val(pgprot_large_2_4k(__pgprot(pte_flags(*pte) & _PAGE_LARGE_CACHE_MASK)));
}

/* Returns true if all of a 2 MiB block is cached in the same way as its first page. */
static bool cached_alike(unsigned long virt)
{
	unsigned int level = PG_LEVEL_4K;
	u64 first = caching(virt, &level);
	unsigned long page;

	for (page = virt + PAGE_SIZE; level == PG_LEVEL_4K && page < virt + PMD_SIZE; page += PAGE_SIZE)
		if (caching(page, &level) != first)
			return false;
	return true;
}

/* Maps memory at its direct-map address for a snapshot. Mappings that exist already stay as they are. */
u32 mercury_map_memory(phys_addr_t start, phys_addr_t end)
{
	phys_addr_t phys, size;

	/* Without a hypervisor there is nothing to map for. */
	for (phys = wide ? start : end; phys < end; phys += size) {
		unsigned long virt = (unsigned long)phys_to_virt(phys);
		u64 *entry = wide_entry(virt, PMD_SHIFT);
		unsigned int level;
		u64 type = caching(virt, &level);

		if (!entry)
			return MERCURY_CODE_NO_MEMORY;
		size = PMD_SIZE;
		if (!*entry && IS_ALIGNED(phys, PMD_SIZE) && end - phys >= PMD_SIZE && cached_alike(virt)) {
			*entry = phys | wide_flags() | _PAGE_PSE |
				 pgprot_val(pgprot_4k_2_large(__pgprot(type)));
			continue;
		}
		entry = wide_entry(virt, PAGE_SHIFT);
		if (!entry)
			return MERCURY_CODE_NO_MEMORY;
		size = PAGE_SIZE;
		if (!*entry)
			*entry = phys | wide_flags() | type;
	}
	return MERCURY_CODE_OK;
}

/* Maps a page of registers for a snapshot, uncached. */
u32 mercury_map_registers(phys_addr_t phys)
{
	u64 *entry = wide_entry((unsigned long)phys_to_virt(phys), PAGE_SHIFT);

	if (!entry)
		return MERCURY_CODE_NO_MEMORY;
	*entry = phys | wide_flags() | _PAGE_PCD | _PAGE_PWT;
	return MERCURY_CODE_OK;
}

/* Takes out the mappings of a snapshot, and frees their tables if no CPU can use them any more. */
static void forget(u64 *table, int shift, bool free)
{
	unsigned int i;

	for (i = 0; i < 512; i++) {
		u64 *entry = table + i;

		if (!*entry)
			continue;
		if (shift == PAGE_SHIFT || *entry & (_PAGE_PSE | WINDOWS)) {
			if (*entry & FOR_SNAPSHOT)
				*entry = 0;
			continue;
		}
		forget(phys_to_virt(*entry & PHYSICAL_PAGE_MASK), shift - 9, free);
		if (free && *entry & FOR_SNAPSHOT) {
			free_page((unsigned long)phys_to_virt(*entry & PHYSICAL_PAGE_MASK));
			*entry = 0;
		}
	}
}

void mercury_unmap_memory(void)
{
	if (wide)
		forget(wide, top_shift(), false);
}

/* A copy of a table and of those below. */
static u64 *copy(const u64 *table, int shift)
{
	u64 *new = (u64 *)get_zeroed_page(GFP_KERNEL);
	unsigned int i;

	for (i = 0; new && i < 512; i++) {
		u64 *below;

		if (!table[i])
			continue;
		if (shift == PAGE_SHIFT || table[i] & WINDOWS) {
			new[i] = table[i];
			continue;
		}
		below = copy(phys_to_virt(table[i] & PHYSICAL_PAGE_MASK), shift - 9);
		if (!below)
			break;
		new[i] = virt_to_phys(below) | TABLE_FLAGS | FOR_SNAPSHOT;
	}
	if (new && i < 512) {
		forget(new, shift, true);
		free_page((unsigned long)new);
		new = NULL;
	}
	return new;
}

/* Makes the copy, on native CPUs, when everything else is mapped. */
u32 mercury_tables_copy(void)
{
	wide = copy(root, top_shift());
	return wide ? MERCURY_CODE_OK : MERCURY_CODE_NO_MEMORY;
}

u64 mercury_tables_wide_cr3(void)
{
	return wide ? virt_to_phys(wide) : 0;
}

/* Every CPU must be native. */
void mercury_tables_destroy(void)
{
	if (wide) {
		forget(wide, top_shift(), true);
		free_page((unsigned long)wide);
	}
	wide = NULL;
	root = NULL;
}
