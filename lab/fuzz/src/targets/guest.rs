//! The firmware's tables, and the description of a machine that becomes a guest.

use crate::Target;

pub const TARGET: Target = Target {
    name: "guest",
    run: mercury_guest::fuzz::run,
    seeds: || mercury_guest::fuzz::SEEDS.iter().map(|seed| seed.to_vec()).collect(),
};
