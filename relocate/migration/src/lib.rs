//! Moving a running machine to another one: all of it that is pure logic, and nothing that touches a machine.
//!
//! * [`protocol`]: which end may do what and when, so that the machine never runs twice; checked exhaustively.
//! * [`session`]: who the other end is.
//! * [`wire`]: what goes over a connection, and how it is refused.
//! * [`streams`]: several connections of one attempt.
//! * [`hail`]: what is said where there can be no connection.
//! * [`rounds`]: when to stop the machine, by what the rounds so far were like.

#![forbid(unsafe_code)]

pub mod hail;
pub mod protocol;
pub mod rounds;
pub mod session;
pub mod streams;
pub mod wire;
