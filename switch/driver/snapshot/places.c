// SPDX-License-Identifier: GPL-2.0-only
/*
 * Places of frames until the landing, see landing.h. A frame whose destination this kernel occupies waits in
 * memory that the image leaves out, or in a destination frame that is all zeros.
 */
#include <linux/bitmap.h>
#include <linux/mm.h>
#include <linux/string.h>
#include <asm/pgtable_types.h>

#include "../mercury_abi.h"
#include "landing.h"

#define TABLE_FLAGS	(_PAGE_PRESENT | _PAGE_RW | _PAGE_ACCESSED)
#define LEAF_FLAGS	(TABLE_FLAGS | _PAGE_DIRTY)

/* Puts a page at the head of a list of pages, each of which holds the address of the next. */
static void push(u64 *head, u64 phys)
{
	*(u64 *)mercury_restore_virt(phys) = *head;
	*head = phys;
}

/* Takes the page at the head of such a list; returns 0 if there is none. */
static u64 pop(u64 *head)
{
	u64 phys = *head;

	if (phys)
		*head = *(u64 *)mercury_restore_virt(phys);
	return phys;
}

/* Sets pages aside for the landing: no frame waits in one, and none is a destination. */
u32 mercury_places_begin(struct mercury_places *places)
{
	u64 pages = mercury_plan_aside(&places->plan);

	if (places->again && !mercury_plan_has_room(&places->plan, pages))
		return MERCURY_CODE_RESTORE_ROOM;
	while (pages--) {
		u64 phys = mercury_plan_unused_page(&places->plan);

		if (!phys)
			return MERCURY_CODE_RESTORE_ROOM;
		push(&places->reserve, phys);
	}
	return MERCURY_CODE_OK;
}

/* Returns a page that was set aside; 0 if there is none left. */
u64 mercury_places_reserved(struct mercury_places *places)
{
	return pop(&places->reserve);
}

/* Lists a copy for the landing; returns false if there is no room. */
static bool add_copy(struct mercury_places *places, struct mercury_copies *copies, u64 destination,
		     u64 from)
{
	u64 *entry;

	if (!copies->virt || copies->virt->count == MERCURY_LANDING_LIST_MAX) {
		u64 phys = mercury_places_reserved(places);

		if (!phys)
			return false;
		copies->virt = mercury_restore_virt(phys);
		copies->virt->next_phys = copies->first;
		copies->virt->count = 0;
		copies->first = phys;
	}
	entry = &copies->virt->copies[2 * copies->virt->count++];
	entry[0] = destination;
	entry[1] = from;
	return true;
}

/* Returns a page in which a frame can wait until the landing; 0 if there is none left. */
static u64 waiting_page(struct mercury_places *places)
{
	u64 phys = mercury_plan_unused_page(&places->plan);

	if (phys || places->again)
		return phys;
	phys = pop(&places->zero_frames);
	/* It becomes zeros again after all copies. */
	return phys && add_copy(places, &places->zeros, phys, 0) ? phys : 0;
}

/* Returns the page for a frame's content, which is the same each time; NULL if there is no room. */
static void *place_for(struct mercury_places *places, u64 destination)
{
	u64 occupied = mercury_plan_occupied_number(&places->plan, destination), waiting;

	if (occupied == MERCURY_NO_NUMBER)
		return mercury_restore_virt(destination);
	if (places->waiting[occupied])
		return mercury_restore_virt(places->waiting[occupied]);
	waiting = waiting_page(places);
	if (!waiting || !add_copy(places, &places->copies, destination, waiting))
		return NULL;
	places->waiting[occupied] = waiting;
	return mercury_restore_virt(waiting);
}

/* Returns the number of a frame in the image, or MERCURY_NO_NUMBER. */
static u64 number_of(const struct mercury_places *places, u64 phys)
{
	return phys % PAGE_SIZE ? MERCURY_NO_NUMBER : mercury_plan_number(&places->plan, phys);
}

/*
 * Returns the content of a frame that has been loaded; NULL if it has not, or if it is all zeros, so that
 * other frames may wait in it.
 */
void *mercury_places_content(const struct mercury_places *places, u64 phys)
{
	u64 number = number_of(places, phys), occupied = mercury_plan_occupied_number(&places->plan, phys);

	if (number == MERCURY_NO_NUMBER || !test_bit(number, places->loaded) ||
	    test_bit(number, places->empty))
		return NULL;
	return mercury_restore_virt(occupied == MERCURY_NO_NUMBER ? phys : places->waiting[occupied]);
}

/* Loads a frame of zeros that does not come again: other frames may wait in it. */
static u32 load_empty(struct mercury_places *places, u64 destination)
{
	void *virt = mercury_restore_virt(destination);

	if (virt) {
		memset(virt, 0, PAGE_SIZE);
		push(&places->zero_frames, destination);
	} else if (!add_copy(places, &places->zeros, destination, 0)) {
		return MERCURY_CODE_RESTORE_ROOM;
	}
	__set_bit(number_of(places, destination), places->empty);
	return MERCURY_CODE_OK;
}

/*
 * Finds a place for a frame, and fills it with zeros or with the content of another frame. If the frame has
 * data, `page` becomes the page to copy it to, otherwise NULL.
 */
u32 mercury_places_load(struct mercury_places *places, const struct mercury_load_entry *entry, void **page)
{
	bool is_zero = entry->source == MERCURY_LOAD_ZERO, is_data = entry->source == MERCURY_LOAD_DATA;
	u64 number = number_of(places, entry->frame_phys);
	const void *twin = NULL;
	void *place;

	*page = NULL;
	if (number == MERCURY_NO_NUMBER || (test_bit(number, places->loaded) && !places->again))
		return MERCURY_CODE_RESTORE_FRAME;
	if (is_zero && !places->again)
		return load_empty(places, entry->frame_phys);
	if (!is_zero && !is_data) {
		twin = mercury_places_content(places, entry->source);
		if (!twin)
			return MERCURY_CODE_RESTORE_FRAME;
	}
	place = place_for(places, entry->frame_phys);
	if (!place)
		return MERCURY_CODE_RESTORE_ROOM;
	if (twin)
		memmove(place, twin, PAGE_SIZE);
	else if (is_zero)
		memset(place, 0, PAGE_SIZE);
	else
		*page = place;
	return MERCURY_CODE_OK;
}

/* Notes that a frame has its content. */
void mercury_places_loaded(struct mercury_places *places, u64 phys)
{
	if (!__test_and_set_bit(number_of(places, phys), places->loaded))
		places->loaded_count++;
}

/*
 * Returns the first list of the landing: all copies, and then all zeros, in which frames may wait. Frames of
 * zeros in which none waits hold zeros from here on, and no links.
 */
u64 mercury_places_finish(struct mercury_places *places)
{
	struct mercury_landing_list *last;
	u64 phys;

	while ((phys = pop(&places->zero_frames)))
		*(u64 *)mercury_restore_virt(phys) = 0;
	if (!places->copies.first)
		return places->zeros.first;
	last = mercury_restore_virt(places->copies.first);
	while (last->next_phys)
		last = mercury_restore_virt(last->next_phys);
	last->next_phys = places->zeros.first;
	return places->copies.first;
}

/* Returns the table below an entry, made if there is none; NULL if there is no room. */
static u64 *table_below(struct mercury_places *places, u64 *entry)
{
	if (!*entry) {
		u64 phys = mercury_places_reserved(places);

		if (!phys)
			return NULL;
		memset(mercury_restore_virt(phys), 0, PAGE_SIZE);
		*entry = phys | TABLE_FLAGS;
	}
	return mercury_restore_virt(*entry & PHYSICAL_PAGE_MASK);
}

/* Maps one page of 1 << `size` bytes. An entry of the root spans 1 << `top` bytes. */
static u32 map(struct mercury_places *places, u64 *table, int top, u64 virt, u64 phys, int size)
{
	int shift;

	for (shift = top; table && shift > size; shift -= 9)
		table = table_below(places, table + ((virt >> shift) & 511));
	if (!table)
		return MERCURY_CODE_RESTORE_ROOM;
	table[(virt >> size) & 511] = phys | LEAF_FLAGS | (size > PAGE_SHIFT ? _PAGE_PSE : 0);
	return MERCURY_CODE_OK;
}

/*
 * Maps the image's memory at its physical address, and not a page more: its neighbours may be broken, or the
 * firmware's, and must not be read even by speculation. Maps the text at which the CPUs go on at its own
 * address as well.
 */
u32 mercury_places_map(struct mercury_places *places, u64 *root, int top, u64 resume_virt,
		       const u64 resume_phys[2])
{
	u32 code = MERCURY_CODE_OK, i = 0;

	while (code == MERCURY_CODE_OK && i < places->plan.range_count) {
		u64 phys = places->plan.ranges[i].start_phys;
		u64 end = mercury_plan_stretch_end(&places->plan, &i);

		while (code == MERCURY_CODE_OK && phys < end) {
			bool large = phys % PMD_SIZE == 0 && end - phys >= PMD_SIZE;

			code = map(places, root, top, phys, phys, large ? PMD_SHIFT : PAGE_SHIFT);
			phys += large ? PMD_SIZE : PAGE_SIZE;
		}
	}
	for (i = 0; code == MERCURY_CODE_OK && i < 2; i++)
		if (resume_phys[i])
			code = map(places, root, top, resume_virt / PAGE_SIZE * PAGE_SIZE + i * PAGE_SIZE,
				   resume_phys[i], PAGE_SHIFT);
	return code;
}
