/* SPDX-License-Identifier: GPL-2.0-only */
/* Bits of entries in page tables (AMD64 Manual, volume 2, 5.4). */
#define _PAGE_PRESENT		0x01UL
#define _PAGE_RW		0x02UL
#define _PAGE_ACCESSED		0x20UL
#define _PAGE_DIRTY		0x40UL
#define _PAGE_PSE		0x80UL
#define PHYSICAL_PAGE_MASK	0x000ffffffffff000UL
