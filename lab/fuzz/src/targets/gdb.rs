//! Packets of gdb's remote protocol, and the decoder of a step.
//!
//! The target is in the crate of the hosted machine. It has no machine, so that packets about registers
//! and memory end in a refusal.

use crate::Target;

pub const TARGET: Target = Target {
    name: "gdb",
    run: |input| {
        mercury_hosted::fuzz::gdb(input);
        u64::from(input.len().max(1).ilog2())
    },
    seeds: || mercury_hosted::fuzz::GDB_SEEDS.iter().map(|seed| seed.to_vec()).collect(),
};
