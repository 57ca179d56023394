// SPDX-License-Identifier: GPL-2.0-only
/* The layout of structures that the tests declare again. */
#include "../../driver/mercury_abi.h"
#include "../../driver/snapshot/landing.h"

const size_t mercury_host_plan_size = sizeof(struct mercury_plan);
const size_t mercury_host_plan_next_page = offsetof(struct mercury_plan, next_page);
const size_t mercury_host_places_size = sizeof(struct mercury_places);
const size_t mercury_host_places_zeros = offsetof(struct mercury_places, zeros);
