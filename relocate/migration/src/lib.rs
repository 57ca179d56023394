//! The logic of a live migration. This crate decides, and touches no machine.
//!
//! - [`protocol`]: the permitted steps of both ends, so that the machine never runs twice; a model
//!   checker tries all states.
//! - [`session`]: the authentication of the other end.
//! - [`wire`]: the format on a connection, and the refusal of everything else.
//! - [`streams`]: several connections of one attempt.
//! - [`announcement`]: announcements, where no connection is possible.
//! - [`rounds`]: the decision when to stop the machine, from the numbers of the rounds so far.

#![forbid(unsafe_code)]

pub mod announcement;
pub mod protocol;
pub mod rounds;
pub mod session;
pub mod streams;
pub mod wire;
