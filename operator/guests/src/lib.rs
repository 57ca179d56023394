//! The guests of a host: their options, their names, and their state.
//!
//! Two programs need these. `mercury` reads the command line, and lists and stops guests. `mercury-guest`
//! runs a guest. This crate has nothing of the monitor, so that `mercury` stays small.

// Names of options and fields need no sentence.
#![allow(missing_docs)]

pub mod held;
mod state;

use clap::{Args, ValueEnum};
use mercury_hosted_options::net::{Forward, Mac, Uplink};
use std::path::PathBuf;

pub use mercury_hosted_options::name::Name;
pub use state::{Folder, Guest, Keeper, NotAdmitted, Phase, Root, Status};

/// The options of a guest.
#[derive(Debug, Default, Args)]
pub struct GuestArgs {
    /// The options that do not depend on where the guest comes from.
    #[command(flatten)]
    pub life: LifeArgs,
    /// A disk: a file or a block device, with `,ro` appended if the guest may only read it. After
    /// the name of a disk of the machine, such as nvme0n1 or sda, it is the content of that disk, which
    /// the guest goes on with. Without a name the guest finds it as a new virtio disk
    #[arg(long, value_name = "[NAME=]FILE[,ro]")]
    pub disk: Vec<String>,
    /// A file with the image's memory, unpacked. It is made if it is not there. Guests of one image that name
    /// one file share the memory that they have not written
    #[arg(long, value_name = "FILE")]
    pub memory_file: Option<PathBuf>,
    /// Start the machine although another life of it may write to its disks and file systems on servers: the
    /// machine that ran on, or another guest of the image. This destroys file systems on such disks
    #[arg(long)]
    pub force_server_disks: bool,
    /// The other end of the guest's first serial port: this terminal, or a socket for `mercury
    /// guests console`
    #[arg(long, value_enum, default_value_t = Console::Terminal)]
    pub console: Console,
}

/// The options of a guest wherever it comes from.
#[derive(Clone, Debug, Default, Args)]
pub struct LifeArgs {
    /// The guest's name on this host [default: the machine's host name]
    #[arg(long, value_name = "NAME")]
    pub name: Option<Name>,
    /// A network card, connected to a passt of its own or to a tap interface of yours. It takes over
    /// the addresses of the machine's card
    #[arg(long, value_name = "passt[,host]|tap=NAME")]
    pub net: Option<Uplink>,
    /// The card's address [default: one that is always the same on this host]
    #[arg(long, value_name = "MAC", requires = "net")]
    pub mac: Option<Mac>,
    /// A port of this host that leads to one of the guest, in passt's words: 8080:80, udp:5353:53,
    /// 127.0.0.1/2222:22
    #[arg(long, value_name = "[udp:]PORT[:PORT]", requires = "net")]
    pub forward: Vec<Forward>,
    /// Take a machine with more processors than this host gives. Its kernel may then wait long for processors
    /// that do not run, and a move away may fail
    #[arg(long)]
    pub overcommit_cpus: bool,
}

/// The other end of a guest's first serial port.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Console {
    /// The terminal of the command; Ctrl-A x ends the guest
    #[default]
    Terminal,
    /// A socket, for `mercury guests console`
    Socket,
}
