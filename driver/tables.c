// SPDX-License-Identifier: GPL-2.0-only
/*
 * The hypervisor's own page tables: all that it can reach, in 4 KiB pages, each at the address that
 * the kernel knows it by. As deep as the kernel's tables. The table pages themselves are owned but
 * not mapped: the hypervisor never changes its address space.
 */
#include <linux/mm.h>
#include <asm/io.h>
#include <asm/msr.h>
#include <asm/pgtable_types.h>
#include <asm/special_insns.h>

#include "mercury.h"

#define TABLE_FLAGS	(_PAGE_PRESENT | _PAGE_RW | _PAGE_ACCESSED)

static u64 *root;

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

/* The last-level entry for an address; tables on the way are made as needed. */
static u64 *entry_of(unsigned long virt)
{
	int shift = native_read_cr4() & X86_CR4_LA57 ? 48 : 39;
	u64 *table = root;

	for (; shift > PAGE_SHIFT; shift -= 9) {
		u64 *entry = table + ((virt >> shift) & 511);

		if (!*entry) {
			void *page = mercury_carve(1, 1);

			if (!page)
				return NULL;
			*entry = virt_to_phys(page) | TABLE_FLAGS;
		}
		table = phys_to_virt(*entry & PHYSICAL_PAGE_MASK);
	}
	return table + ((virt >> PAGE_SHIFT) & 511);
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
		u64 *entry = entry_of((unsigned long)virt + i * PAGE_SIZE);

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
