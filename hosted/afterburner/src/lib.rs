//! The afterburner makes a Linux kernel *pre-virtualized* while the kernel is built, without a
//! change of its source.
//!
//! It stands where gcc looks for the assembler, and reads the kernel's text as the compiler or a
//! programmer wrote it. It finds the instructions that a processor executes differently for a
//! kernel than for a process. It makes room for a jump at each, and records the place of that room.
//! The resulting kernel runs on a bare machine as before. A monitor that loads the kernel
//! elsewhere, into a process, fills the room with its own jumps.
//!
//! - [`kind`]: the sensitive instructions.
//! - [`statement`] cuts the text into statements. [`section`] and [`context`] follow their place.
//!   [`operand`] reads the operands of moves, and [`neighbour`] decides which other instructions
//!   may share a slot. [`rewrite`] forms the slots. [`prelude`] catches instructions that only the
//!   assembler sees.
//! - [`place`]: the files that are left as they are; [`assembler`]: the stand-in itself; [`make`]:
//!   the build around it.
//! - [`record`]: the section in which slots are recorded.
//! - [`verify`]: disassembles the linked file and accounts for every sensitive instruction.

pub mod args;
pub mod assembler;
pub mod context;
pub mod error;
pub mod generate;
pub mod kind;
pub mod make;
pub mod neighbour;
pub mod operand;
pub mod place;
pub mod prelude;
pub mod record;
pub mod rewrite;
pub mod section;
pub mod statement;
pub mod verify;
