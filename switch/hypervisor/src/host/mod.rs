//! The hypervisor's own side of the processor: descriptor tables, entry points, exceptions.

pub mod entry;
pub mod exceptions;
pub mod tables;
