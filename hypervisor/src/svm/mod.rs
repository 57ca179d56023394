//! AMD: Secure Virtual Machine with nested paging (APM vol. 2, chapter 15).
//!
//! * [`vmcb`]: the control block's layout;
//! * [`capture`]: live state of a native CPU into the control block, and back at a departure;
//! * [`run`]: the world switch;
//! * [`quick`]: the driver's hypercalls; [`exits`]: everything else that the processor reported, in the
//!   words of [`crate::exit`];
//! * [`machine_check`]: those that strike in the hypervisor, handed to the system;
//! * [`msr`]: the MSRs that must not be written unseen;
//! * [`refusal`]: which check of VMRUN a control block fails.

pub mod capture;
pub mod exits;
pub mod machine_check;
pub mod msr;
pub mod quick;
pub mod refusal;
pub mod run;
#[cfg(test)]
mod tests;
pub mod vmcb;
