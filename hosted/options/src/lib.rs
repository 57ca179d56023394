//! The command lines of `mercury hosted` and `mercury disco`, and the types of its options.
//!
//! Two programs read the command line: `mercury`, for help, manual pages and completions, and
//! `mercury-hosted`, which runs the machine. This crate has what both need, so that `mercury` carries nothing
//! of the runtime.
//!
//! - [`net`]: network cards and their addresses. [`gdb`]: the address of a debugger.

// Names of options and fields need no sentence.
#![allow(missing_docs)]

pub mod disco;
pub mod gdb;
mod memory;
pub mod name;
pub mod net;
pub mod region;

use std::{ffi::OsString, path::PathBuf};

use clap::{Args, Subcommand, ValueEnum};

use gdb::{Address, GdbOption};
use name::Name;
use net::{Forward, Mac, Network, SubnetName};
use region::RegionOption;

/// The commands below `mercury hosted`.
#[derive(Debug, Subcommand)]
pub enum HostedCommand {
    /// Start a kernel in this process, with its console on this terminal
    #[command(
        long_about = "Starts a kernel that was built with the afterburner in this process: without root, \
        without hardware virtualization. Its first serial port is this terminal; Ctrl-A x ends it.\n\nThe \
        guest's kernel, its programs and this program share one address space, and are not protected from \
        each other. --isolation=process puts the guest's programs into processes of their own.\n\nThe \
        exit status is 0 when the guest has halted, 10 when it has asked for a reset (as after a panic), \
        11 when it cannot go on."
    )]
    Run(RunArgs),
    /// Start gdb at a machine that was started with --gdb
    #[command(
        long_about = "Starts gdb with a kernel's symbols, moved to the kernel's address, and connects it \
        to a machine that was started with --gdb. The machine stops for gdb; gdb's `detach` lets it go \
        on, `kill` ends it."
    )]
    Gdb(GdbArgs),
    /// Write a machine that was started with --control into a file, and end it
    #[command(
        long_about = "Writes a machine that was started with --control into a new file: its memory, its \
        processor and its devices. Then it ends the machine. If anything fails before, the machine goes on."
    )]
    Save(SaveArgs),
    /// Let a saved machine go on, with its console on this terminal
    #[command(
        long_about = "Lets a saved machine go on in this process. The options are those that it was started \
        with: the same kernel, disks, memory, isolation and kind of network. What differs is refused by its \
        name, and so is a file that is damaged, or a host with another processor. Connections with other \
        machines do not go on."
    )]
    Restore(RestoreArgs),
    /// Show the subnets of your machines
    #[command(
        long_about = "Shows the subnets of your machines (--net subnet=NAME), with the machines that are on \
        them: their cards' addresses and their processes."
    )]
    Net(NetArgs),
    /// Keep a subnet. The first machine of the subnet starts this
    #[command(hide = true)]
    KeepSubnet(KeepArgs),
    /// Keep a region. The first machine with the region starts this
    #[command(hide = true)]
    KeepRegion(KeepRegionArgs),
}

/// The options of `mercury hosted net`.
#[derive(Debug, Args)]
pub struct NetArgs {
    /// Only this subnet
    pub name: Option<SubnetName>,
}

/// The options of the process that keeps a subnet.
#[derive(Debug, Args)]
pub struct KeepArgs {
    pub name: SubnetName,
}

/// The options of the process that keeps a region.
#[derive(Debug, Args)]
pub struct KeepRegionArgs {
    pub name: Name,
    pub bytes: u64,
}

/// The options of `mercury hosted save`.
#[derive(Debug, Args)]
pub struct SaveArgs {
    /// The machine's socket (--control)
    #[arg(value_name = "SOCKET")]
    pub machine: PathBuf,
    /// The new file
    pub file: PathBuf,
}

/// The options of `mercury hosted restore`.
#[derive(Debug, Args)]
pub struct RestoreArgs {
    /// The saved machine
    pub file: PathBuf,
    #[command(flatten)]
    pub run: RunArgs,
}

/// The options of `mercury hosted gdb`.
#[derive(Debug, Args)]
pub struct GdbArgs {
    /// The machine's socket, or its port
    #[arg(value_name = "SOCKET|:PORT")]
    pub address: Address,
    /// The vmlinux that runs there
    #[arg(long, value_name = "FILE")]
    pub kernel: PathBuf,
    /// More arguments for gdb, after --
    #[arg(last = true)]
    pub arguments: Vec<OsString>,
}

/// The separation of a guest's programs from its kernel.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum Isolation {
    /// No separation: programs and kernel share one address space
    None,
    /// A process of its own for each address space; slower for system calls, faster for switches
    Process,
}

/// The options of `mercury hosted run`.
#[derive(Debug, Args)]
pub struct RunArgs {
    /// The vmlinux that the build with the afterburner has left, not stripped
    #[arg(long, value_name = "FILE")]
    pub kernel: PathBuf,
    /// The guest's first file system, a cpio archive
    #[arg(long, value_name = "FILE")]
    pub initramfs: Option<PathBuf>,
    /// A disk: a file or a block device, with `,ro` appended if the guest may only read it. The
    /// first one is /dev/vda. With `,shared` or `,private` a file becomes a part of the guest's memory, and
    /// machines with the same file share its pages. The first such disk is /dev/pmem0. With `,shared` the
    /// guest may only read it. With `,private` it may write to pages of its own, which are gone at the end
    #[arg(long, value_name = "FILE[,ro|,shared|,private]")]
    pub disk: Vec<String>,
    /// Memory that all machines of yours with a region of this NAME have in common. All of them may write to
    /// it. The SIZE is a multiple of 2 MiB, and the same for all. In the guest it is /dev/pmem0, or the
    /// next after the disks in memory. It is gone when the last machine with it has ended
    #[arg(long, value_name = "NAME,SIZE")]
    pub region: Vec<RegionOption>,
    /// A network card, connected to a passt of its own, to a tap interface of yours, or to a subnet: a
    /// network of machines of yours with the same NAME. With `passt,host` the guest reaches this host's
    /// 127.0.0.1 at its gateway's address. A machine may have two cards: the first to the outside, the
    /// second on a subnet
    #[arg(long, value_name = "passt[,host]|tap=NAME|subnet=NAME")]
    pub net: Vec<Network>,
    /// The card's address [default: one that is always the same on this host]. With two cards the option
    /// may be given twice, in the order of --net
    #[arg(long, value_name = "MAC", requires = "net")]
    pub mac: Vec<Mac>,
    /// A port of this host that leads to one of the guest, in passt's words: 8080:80, udp:5353:53,
    /// 127.0.0.1/2222:22
    #[arg(long, value_name = "[udp:]PORT[:PORT]", requires = "net")]
    pub forward: Vec<Forward>,
    /// Socket, or port of 127.0.0.1, for gdb. With `,wait` appended the kernel starts only when gdb
    /// lets it
    #[arg(long, value_name = "SOCKET|:PORT[,wait]")]
    pub gdb: Option<GdbOption>,
    /// Memory: 512M, 4G; a number alone is MiB
    #[arg(long, value_name = "SIZE", default_value = "256M", value_parser = memory::mebibytes)]
    pub memory: u64,
    /// Processors, each of them a process of this host; 8 at most
    #[arg(
        long,
        value_name = "NUMBER",
        default_value_t = 1,
        value_parser = clap::value_parser!(u8).range(1..=8)
    )]
    pub cpus: u8,
    /// Words for the kernel's command line
    #[arg(long, value_name = "WORDS", default_value = "", allow_hyphen_values = true)]
    pub append: String,
    /// Separation of the guest's programs from its kernel and from this program: none, or processes
    /// of their own
    #[arg(long, value_enum, default_value_t = Isolation::None)]
    pub isolation: Isolation,
    /// Leave programs as they are: each of their system calls is a signal (with --isolation=process
    /// it always is)
    #[arg(long)]
    pub no_rewrite: bool,
    /// A socket by which `mercury hosted save` can save the machine
    #[arg(long, value_name = "SOCKET", conflicts_with_all = ["gdb", "cpus"])]
    pub control: Option<PathBuf>,
    /// Report unusual actions of the guest, and print the counters at its end
    #[arg(long)]
    pub verbose: bool,
    /// Load the kernel and report the findings, but do not start it
    #[arg(long)]
    pub check: bool,
}
