//! Registers, rings and buffers of a virtio device, from a hostile guest.
//!
//! The target is in the crate of the hosted machine, which keeps devices to itself.

use crate::Target;

pub const TARGET: Target = Target {
    name: "virtio",
    run: |input| {
        mercury_hosted::fuzz::virtio(input);
        u64::from(input.len().max(1).ilog2())
    },
    seeds: || mercury_hosted::fuzz::VIRTIO_SEEDS.iter().map(|seed| seed.to_vec()).collect(),
};
