//! The hypervisor's logic. It knows no Linux, no policy, no files and no network, and it builds on the
//! host too, where its tests run; `main.rs` makes the freestanding image of it.
//!
//! From the outside in:
//!
//! * [`native`]: what the driver asks for on a native CPU: take over memory, build the nested tables,
//!   preflight, attach;
//! * [`exit`]: what an attached CPU comes in for, above the vendor boundary; [`event`]: what is delivered to it;
//!   [`machine_check`]: those that strike in the hypervisor, handed to the system;
//! * [`vendor`]: that boundary; [`svm`] and [`vmx`]: AMD's side of it and Intel's, file by file the same (but for
//!   INIT); [`msr`]: what both make of MSRs;
//! * [`emergency`]: how a CPU leaves when something went wrong, and the record that it leaves behind;
//! * [`cpu`]: the per-CPU area; [`host`]: the hypervisor's own descriptor tables and entry points;
//! * [`nested`], [`paging`], [`mtrr`], [`address`]: the identity map;
//! * [`snapshot`]: what memory held at one instant, and the way back to it; [`pci`]: devices that are silenced for it;
//! * [`speculation`]: predictions that are forgotten before memory is mapped;
//! * [`publish`]: counters and the log; [`fault`]: fault points; [`x86`]: instructions.

#![cfg_attr(not(test), no_std)]

pub mod address;
pub mod argument;
pub mod cpu;
pub mod emergency;
pub mod event;
pub mod exit;
pub mod fault;
pub mod host;
pub mod machine_check;
#[cfg(test)]
mod model;
pub mod msr;
pub mod mtrr;
pub mod native;
pub mod nested;
pub mod paging;
pub mod pci;
pub mod publish;
pub mod quick;
pub mod snapshot;
pub mod speculation;
pub mod svm;
pub mod vendor;
pub mod vmx;
pub mod x86;
