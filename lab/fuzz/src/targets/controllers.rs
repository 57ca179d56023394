//! The configuration space, registers, queues and commands of an NVMe controller, from a hostile guest.

use crate::Target;

pub const TARGET: Target = Target {
    name: "controllers",
    run: mercury_controllers::fuzz::run,
    seeds: || mercury_controllers::fuzz::SEEDS.iter().map(|seed| seed.to_vec()).collect(),
};
