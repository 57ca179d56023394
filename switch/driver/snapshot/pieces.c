// SPDX-License-Identifier: GPL-2.0-only
/*
 * The memory of a snapshot itself. The snapshot does not keep these pages: the hypervisor and the driver
 * write to them while it lasts. They are marked reserved, as the hypervisor's own memory is, so that the
 * kernel neither migrates nor offlines them.
 */
#include <linux/gfp.h>
#include <linux/ioport.h>
#include <linux/mm.h>
#include <linux/slab.h>
#include <asm/io.h>

#include "snapshot.h"

/* Each piece of a map of pages has a bit for each page of 4 GiB. */
#define MAP_ORDER	get_order(MERCURY_MAP_BITS / BITS_PER_BYTE)

struct piece {
	struct page *page;
	unsigned int order;
	/* Its pages belong to the pool, which frees them one by one. */
	bool is_pool;
};

static struct piece *pieces;
static unsigned int count;

u32 mercury_pieces_begin(void)
{
	pieces = kvmalloc_array(MERCURY_HOLES_MAX, sizeof(*pieces), GFP_KERNEL);
	return pieces ? MERCURY_CODE_OK : MERCURY_CODE_NO_MEMORY;
}

static struct piece *add(unsigned int order, gfp_t flags)
{
	struct piece *piece = &pieces[count];
	unsigned int i;

	if (!pieces || count == MERCURY_HOLES_MAX)
		return NULL;
	piece->page = alloc_pages(flags | __GFP_NOWARN, order);
	if (!piece->page)
		return NULL;
	for (i = 0; i < 1U << order; i++)
		SetPageReserved(piece->page + i);
	piece->order = order;
	piece->is_pool = false;
	count++;
	return piece;
}

/* Allocates 1 << order zeroed pages that the snapshot does not keep; returns NULL if there are none. */
void *mercury_piece(unsigned int order, gfp_t flags)
{
	struct piece *piece = add(order, flags | __GFP_ZERO);

	return piece ? page_address(piece->page) : NULL;
}

/* Allocates so many zeroed bytes that the snapshot does not keep. */
void *mercury_piece_of(size_t size, gfp_t flags)
{
	return mercury_piece(get_order(size), flags);
}

/* Allocates pages for the pool, which frees each of them by itself. */
struct page *mercury_piece_for_pool(unsigned int order, gfp_t flags)
{
	struct piece *piece = add(order, flags);

	if (!piece)
		return NULL;
	piece->is_pool = true;
	split_page(piece->page, order);
	return piece->page;
}

unsigned int mercury_pieces_count(void)
{
	return count;
}

/* Reads the range of a piece; returns false if there is no piece with this number. */
bool mercury_piece_range(unsigned int number, struct mercury_owned_range *range, bool *is_pool)
{
	if (number >= count)
		return false;
	range->start_phys = page_to_phys(pieces[number].page);
	range->pages = 1UL << pieces[number].order;
	*is_pool = pieces[number].is_pool;
	return true;
}

/* Frees all pieces but those of the pool. */
void mercury_pieces_free(void)
{
	unsigned int i, page;

	for (i = 0; i < count; i++) {
		if (pieces[i].is_pool)
			continue;
		for (page = 0; page < 1U << pieces[i].order; page++)
			ClearPageReserved(pieces[i].page + page);
		__free_pages(pieces[i].page, pieces[i].order);
	}
	kvfree(pieces);
	pieces = NULL;
	count = 0;
}

static int find_end(struct resource *ram, void *end)
{
	*(u64 *)end = max_t(u64, *(u64 *)end, ram->end + 1);
	return 0;
}

struct map {
	unsigned long **bits;
	unsigned long count;
};

static int add_bits(struct resource *ram, void *argument)
{
	unsigned long at, last = PHYS_PFN(ram->end) / MERCURY_MAP_BITS;
	struct map *map = argument;

	/* Memory that is plugged in meanwhile may lie beyond the map. */
	if (last >= map->count)
		return 1;
	for (at = PHYS_PFN(ram->start) / MERCURY_MAP_BITS; at <= last; at++) {
		if (!map->bits[at])
			map->bits[at] = mercury_piece(MAP_ORDER, GFP_KERNEL);
		if (!map->bits[at])
			return 1;
	}
	return 0;
}

/*
 * Allocates a bit for each page frame number up to the end of memory. The map has a piece wherever there is
 * memory. A count of 0 is replaced by the number of pieces; another count is kept. Returns NULL if there is
 * no room.
 */
unsigned long **mercury_pfn_map(unsigned long *count)
{
	unsigned long type = IORESOURCE_SYSTEM_RAM | IORESOURCE_BUSY;
	struct map map;
	u64 end = 0;

	if (!*count) {
		walk_iomem_res_desc(IORES_DESC_NONE, type, 0, -1, &end, find_end);
		*count = DIV_ROUND_UP(PHYS_PFN(end), MERCURY_MAP_BITS);
	}
	map.count = *count;
	map.bits = mercury_piece_of(*count * sizeof(*map.bits), GFP_KERNEL);
	if (!map.bits || walk_iomem_res_desc(IORES_DESC_NONE, type, 0, -1, &map, add_bits) > 0)
		return NULL;
	return map.bits;
}

/* Allocates a bit for each of so many pages, in pieces; returns NULL if there is no room. */
unsigned long **mercury_number_map(unsigned long pages)
{
	unsigned long pieces_wanted = DIV_ROUND_UP(pages, MERCURY_MAP_BITS), i;
	unsigned long **bits = mercury_piece_of(pieces_wanted * sizeof(*bits), GFP_KERNEL);

	for (i = 0; bits && i < pieces_wanted; i++) {
		bits[i] = mercury_piece(MAP_ORDER, GFP_KERNEL);
		if (!bits[i])
			return NULL;
	}
	return bits;
}
