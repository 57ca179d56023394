// SPDX-License-Identifier: GPL-2.0-only
/*
 * The hypervisor's image: checked, copied into owned memory and relocated to its direct-map address.
 * switch/abi/src/gate.rs describes the format; image_blob.S embeds it.
 */
#include <linux/elf.h>
#include <linux/kernel.h>
#include <linux/mm.h>
#include <linux/sizes.h>
#include <linux/string.h>

#include "attach.h"

/* No image is near this: a bound before any arithmetic with the header's numbers. */
#define IMAGE_MAX	SZ_2M

const struct mercury_image_header *mercury_image_header(void)
{
	return (const void *)mercury_image;
}

unsigned int mercury_image_pages(void)
{
	return PAGE_ALIGN(mercury_image_header()->memory_end) / PAGE_SIZE;
}

/* Checks that this driver can place the embedded image. */
u32 mercury_image_check(void)
{
	const struct mercury_image_header *header = mercury_image_header();
	u64 size = mercury_image_end - mercury_image;

	if (mercury_fault(MERCURY_FAULT_POINT_LOAD_IMAGE))
		return MERCURY_CODE_BAD_IMAGE;
	if (size < sizeof(*header) || header->magic != MERCURY_IMAGE_MAGIC ||
	    header->abi_version != MERCURY_ABI_VERSION ||
	    header->fault_injection != IS_ENABLED(CONFIG_MERCURY_FAULT_INJECTION))
		return MERCURY_CODE_BAD_IMAGE;
	if (header->memory_end > IMAGE_MAX || header->file_end > header->memory_end ||
	    header->file_end > size || header->rodata_end > header->file_end ||
	    header->text_end > header->rodata_end || !header->entry_offsets[mercury_vendor->number] ||
	    header->entry_offsets[mercury_vendor->number] >= header->text_end ||
	    !PAGE_ALIGNED(header->text_end) || !PAGE_ALIGNED(header->rodata_end))
		return MERCURY_CODE_BAD_IMAGE;
	if (header->rela_size % sizeof(Elf64_Rela) || header->rela_size > size ||
	    header->rela_offset > size - header->rela_size)
		return MERCURY_CODE_BAD_IMAGE;
	return MERCURY_CODE_OK;
}

/* Copies the image to owned, zeroed memory and relocates it there. */
u32 mercury_image_place(void *image)
{
	const struct mercury_image_header *header = mercury_image_header();
	const Elf64_Rela *rela = (const void *)mercury_image + header->rela_offset;
	const Elf64_Rela *end = (const void *)rela + header->rela_size;

	memcpy(image, mercury_image, header->file_end);
	for (; rela < end; rela++) {
		if (rela->r_info != R_X86_64_RELATIVE ||
		    rela->r_offset > header->file_end - sizeof(u64) ||
		    (u64)rela->r_addend > header->memory_end)
			return MERCURY_CODE_BAD_IMAGE;
		*(u64 *)(image + rela->r_offset) = (u64)image + rela->r_addend;
	}
	return MERCURY_CODE_OK;
}
