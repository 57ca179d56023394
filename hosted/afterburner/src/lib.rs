//! The afterburner: makes a Linux kernel *pre-virtualized* while it is built, without a change of its source.
//!
//! It stands where gcc looks for the assembler. What it reads there is the kernel's text as the compiler left it, or as
//! people wrote it; it finds the instructions that a processor executes differently for a kernel than for a process, sees
//! to it that each has room for a jump, and writes down where that room is. The kernel that comes out runs on a
//! bare machine as before; and whoever loads it somewhere else, into a process, fills the room with jumps of its own.
//!
//! - [`kind`]: which instructions those are.
//! - [`statement`] cuts the text into statements, [`section`] and [`context`] know where they go, [`operand`] reads the operands of moves, [`neighbour`] knows which other
//!   instructions may share a slot, [`rewrite`] forms the slots, [`prelude`] catches what only the assembler sees.
//! - [`place`]: which files are left as they are; [`assembler`]: the stand-in itself; [`make`]: the build around it.
//! - [`record`]: the section in which slots are written down.
//! - [`verify`]: disassembles what was linked and accounts for every sensitive instruction.

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
