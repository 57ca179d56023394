// SPDX-License-Identifier: GPL-2.0-only
/*
 * A page of the kernel's own text, which the kernel cannot write, given to a device to read.
 */
#include <linux/dma-mapping.h>
#include <linux/mm.h>
#include <linux/pci.h>
#include <linux/printk.h>

#include "mercury_test.h"

static bool is_writable(struct page *page)
{
	unsigned int level;
	pte_t *entry = lookup_address((unsigned long)page_address(page), &level);

	return entry && pte_write(*entry);
}

/* send-read-only: gives the page to a device */
int test_send_read_only(struct test_answer *answer, const u64 *arguments)
{
	struct page *page = pfn_to_page(PHYS_PFN(__pa(dump_stack)));
	struct pci_dev *device = NULL;
	dma_addr_t address;

	for_each_pci_dev(device)
		if (device->dev.driver)
			break;
	if (!device)
		return -ENODEV;
	test_say(answer, "writable %u\n", is_writable(page));
	address = dma_map_page(&device->dev, page, 0, PAGE_SIZE, DMA_TO_DEVICE);
	test_say(answer, "mapped %u\n", !dma_mapping_error(&device->dev, address));
	dma_unmap_page(&device->dev, address, PAGE_SIZE, DMA_TO_DEVICE);
	pci_dev_put(device);
	return 0;
}
