//! The hypervisor's logic. It knows no Linux, no policy, no files and no network. It also builds on the
//! host, where its tests run; `main.rs` makes the freestanding image of it.
//!
//! From the outside in:
//!
//! * [`native`]: the driver's operations on a native CPU: take over memory, build the nested tables,
//!   preflight, attach;
//! * [`argument`]: addresses that the driver passes, checked once;
//! * [`exit`]: exits of an attached CPU, above the vendor boundary; [`quick`]: the driver's hypercalls
//!   among them; [`event`]: events that are delivered to the system; [`machine_check`]: machine checks that
//!   strike in the hypervisor, handed to the system;
//! * [`vendor`]: that boundary; [`svm`] and [`vmx`]: AMD's side of it and Intel's, file by file the same
//!   (but for INIT); [`msr`]: handling of MSRs that both share;
//! * [`emergency`]: the departure of a CPU after a failure, and the record of that;
//! * [`cpu`]: the per-CPU area; [`host`]: the hypervisor's own descriptor tables and entry points;
//! * [`nested`], [`paging`], [`mtrr`], [`address`]: the identity map;
//! * [`snapshot`]: memory at one instant, and the way back to it; [`pci`]: devices that are silenced for a
//!   rollback;
//! * [`integrity`]: pages that are read-only, so that stores to code are seen;
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
pub mod integrity;
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
