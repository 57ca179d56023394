//! Kernels from Debian's sources in a small configuration, as they are and pre-virtualized, for tests and
//! figures.
//!
//! A release's kernel is built with that release's compiler, in a root of its own under `target/lab/tools/`;
//! objects are kept from one build to the next.

mod account;
mod build;
pub mod disk;
pub mod root;

pub use account::{account, kernel_of};
pub use build::{Built, Flavour, build};
