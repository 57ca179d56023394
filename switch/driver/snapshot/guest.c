// SPDX-License-Identifier: GPL-2.0-only
/*
 * A machine that goes on as a guest. Its image needs the memory of its firmware, which another machine does
 * not have.
 */
#include <linux/io.h>
#include <linux/mm.h>
#include <linux/uaccess.h>
#include <asm/e820/api.h>

#include "snapshot.h"

/* Returns true for memory that the firmware left for itself. */
static bool is_firmware(u64 page)
{
	u64 end = page + PAGE_SIZE;

	if (!PAGE_ALIGNED(page) || page_is_ram(PHYS_PFN(page)))
		return false;
	return page < SZ_1M || e820__mapped_any(page, end, E820_TYPE_ACPI) ||
	       e820__mapped_any(page, end, E820_TYPE_NVS) || e820__mapped_any(page, end, E820_TYPE_RESERVED);
}

/* Reads a page of it for user space, which cannot: the kernel has marked it busy. */
int mercury_firmware_read(const struct mercury_firmware_request *request)
{
	void __iomem *page;
	int result = MERCURY_CODE_OK;

	if (!is_firmware(request->page_phys))
		return MERCURY_CODE_BAD_ARGUMENT;
	page = ioremap_cache(request->page_phys, PAGE_SIZE);
	if (!page)
		return MERCURY_CODE_NO_MEMORY;
	if (copy_to_user(u64_to_user_ptr(request->data_addr), (void __force *)page, PAGE_SIZE))
		result = -EFAULT;
	iounmap(page);
	return result;
}
