//! The memory of a ring between two machines, and packets between a machine and the keeper of its subnet.
//!
//! The target is in the crate of subnets, which keeps the rings' memory to itself.

use crate::Target;

pub const TARGET: Target = Target {
    name: "subnet",
    run: |input| {
        mercury_subnet::fuzz::run(input);
        u64::from(input.len().max(1).ilog2())
    },
    seeds: || mercury_subnet::fuzz::SEEDS.iter().map(|seed| seed.to_vec()).collect(),
};
