// SPDX-License-Identifier: GPL-2.0-only
/*
 * The hypervisor's image, as the kernel sees it. While the CPU is native the module finds the image by
 * its magic, in a reserved page. While the CPU is attached the same addresses must read as zeros, and
 * writes to them must have no effect.
 */
#include <linux/crc32.h>
#include <linux/io.h>
#include <linux/ioport.h>
#include <linux/mm.h>
#include <linux/smp.h>
#include <linux/uaccess.h>

#include "mercury_test.h"

static struct {
	struct mercury_image_header *at;
	u64 constant_end;
	u64 end;
} image;

static bool is_image(struct page *page)
{
	struct mercury_image_header header;

	if (!PageReserved(page) || copy_from_kernel_nofault(&header, page_address(page), sizeof(header)))
		return false;
	return header.magic == MERCURY_IMAGE_MAGIC && header.abi_version == MERCURY_ABI_VERSION &&
	       header.text_end && header.text_end <= header.rodata_end &&
	       header.rodata_end <= header.memory_end && header.memory_end < SZ_16M;
}

static int search(struct resource *resource, void *unused)
{
	unsigned long pfn;

	for (pfn = PFN_UP(resource->start); pfn < PFN_DOWN(resource->end + 1); pfn++) {
		if (!pfn_valid(pfn) || !is_image(pfn_to_page(pfn)))
			continue;
		image.at = page_address(pfn_to_page(pfn));
		image.constant_end = image.at->rodata_end;
		image.end = image.at->memory_end;
		return 1;
	}
	return 0;
}

/* hidden-find: finds the image, on a native CPU */
int test_hidden_find(struct test_answer *answer, const u64 *arguments)
{
	image.at = NULL;
	walk_iomem_res_desc(IORES_DESC_NONE, IORESOURCE_SYSTEM_RAM | IORESOURCE_BUSY, 0, -1, NULL,
			    search);
	if (!image.at)
		return -ENOENT;
	test_say(answer, "phys %#llx\nsize %llu\n", (u64)virt_to_phys(image.at), image.end);
	return 0;
}

/* hidden-read: reads the image on the CPU that runs the command */
int test_hidden_read(struct test_answer *answer, const u64 *arguments)
{
	const u8 *bytes = (const u8 *)image.at;
	u64 nonzero = 0, i;
	unsigned long flags;
	u32 crc;

	if (!image.at)
		return -ENOENT;
	local_irq_save(flags);
	for (i = 0; i < image.end; i++)
		nonzero += READ_ONCE(bytes[i]) != 0;
	crc = crc32_le(~0, bytes, image.constant_end);
	local_irq_restore(flags);
	test_say(answer, "nonzero %llu\ncrc %u\n", nonzero, crc);
	return 0;
}

/* hidden-write OFFSET: writes a word on the CPU that runs the command; refused where the image is visible */
int test_hidden_write(struct test_answer *answer, const u64 *arguments)
{
	u64 offset = arguments[0] & ~7ULL, *word = (void *)image.at + offset;
	unsigned long flags;
	bool seen;

	if (!image.at || offset >= image.end)
		return -ENOENT;
	local_irq_save(flags);
	seen = READ_ONCE(image.at->magic) == MERCURY_IMAGE_MAGIC;
	if (!seen)
		WRITE_ONCE(*word, 0xdeadbeefdeadbeefULL);
	local_irq_restore(flags);
	test_say(answer, "written %d\n", !seen);
	return seen ? -EPERM : 0;
}
