//! Registers, rings and buffers of a virtio device, from a hostile guest.
//!
//! The target is in the crate of the devices, which keeps them to itself.

use crate::Target;

pub const TARGET: Target = Target {
    name: "virtio",
    run: |input| {
        mercury_devices::fuzz::run(input);
        u64::from(input.len().max(1).ilog2())
    },
    seeds: || mercury_devices::fuzz::SEEDS.iter().map(|seed| seed.to_vec()).collect(),
};
