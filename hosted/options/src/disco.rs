//! The commands below `mercury disco`: many machines that begin as copies of one.

use std::path::PathBuf;

use clap::{Args, Subcommand};

use crate::{RunArgs, name::Name, net::Forward};

/// The commands below `mercury disco`.
#[derive(Debug, Subcommand)]
pub enum DiscoCommand {
    /// Make a template from a saved machine
    #[command(
        long_about = "Makes a template from a machine that `mercury hosted save` has saved. The template is \
        a process in the background, which has the machine's memory and waits. `mercury disco run` starts \
        machines as copies of it, in milliseconds: they share the memory that they do not write. The options \
        are those of the saved machine, as for `mercury hosted restore`. A disk must be read-only, or a \
        part of the machine's memory (`,shared` or `,private`)."
    )]
    Template(Box<TemplateArgs>),
    /// Start machines as copies of a template
    #[command(
        long_about = "Starts one machine as a copy of a template, with its console on this terminal; Ctrl-A \
        x ends the machine. With --detach or --count the machines run in the background, and `mercury disco \
        console` shows their consoles."
    )]
    Run(DiscoRunArgs),
    /// Start machines as copies of a machine that runs
    #[command(
        long_about = "Starts machines as copies of a running machine that `mercury disco run` has started. \
        The machine stands still for a moment, and goes on; its copies go on from the same instant, in the \
        background. They share all memory that neither they nor the machine write afterwards. Connections \
        over the network stay with the machine. A machine can be forked seven times, and each of its copies \
        as well."
    )]
    Fork(ForkArgs),
    /// Save a machine that runs into a file; it goes on
    #[command(
        long_about = "Saves a running machine that `mercury disco run` or `fork` has started, as it is now, \
        into a file. The machine stands still for a moment, as for a fork, and goes on while the file is \
        written. `mercury disco template` makes a template of the file, with the options of the machine's \
        own template."
    )]
    Save(SaveArgs),
    /// Give a running machine less memory, or more again
    #[command(
        long_about = "Changes the memory that a running machine has, by its balloon: its kernel gives the \
        rest to the host. The machine has at most the memory with which it was saved, and at least 32 MiB. \
        If its programs have no memory left, its kernel takes some back. Pages that the machine has filled \
        with zeros go to the host as well. The machine's kernel needs CONFIG_VIRTIO_BALLOON."
    )]
    Resize(ResizeArgs),
    /// Put a machine to sleep: all of it goes into a file, and its memory to the host
    #[command(
        long_about = "Writes a machine that runs in the background into a file, and ends its processes. The \
        file is in the folder that its template was given with --sleep-in. The machine goes on at the first \
        key on its console, or with `mercury disco wake`. If it cannot be written it goes on at once. Its \
        connections over the network end. Under memory pressure the template does the same by itself."
    )]
    Sleep(MachineArgs),
    /// Let a machine go on that is asleep
    Wake(MachineArgs),
    /// List templates and their machines
    List,
    /// Show the memory that machines share, and what each has for itself
    #[command(
        long_about = "Shows for each template and machine how much memory is shared and how much is the \
        machine's own, beside what the host's kernel says (the proportional set size, PSS)."
    )]
    Map,
    /// Join the console of a machine that runs in the background
    Console(MachineArgs),
    /// End a machine as a power cut would
    Stop(MachineArgs),
    /// End a template and all of its machines
    Rm(TemplateName),
}

/// The options of `mercury disco template`.
#[derive(Debug, Args)]
pub struct TemplateArgs {
    /// The template's name
    pub name: Name,
    /// The saved machine
    pub file: PathBuf,
    #[command(flatten)]
    pub run: RunArgs,
    /// Stay in the foreground, for a service manager
    #[arg(long)]
    pub foreground: bool,
    /// A folder on a disk for machines that are put to sleep when the host has little memory: idle ones, and
    /// others for a while if no machine is idle. Without it no machine is put to sleep
    #[arg(long, value_name = "FOLDER")]
    pub sleep_in: Option<PathBuf>,
}

/// The options of `mercury disco run`.
#[derive(Debug, Args)]
pub struct DiscoRunArgs {
    /// The template
    pub template: Name,
    /// The machine's name. With --count it is the beginning of the names [default: the template's name and a
    /// number]
    #[arg(long)]
    pub name: Option<Name>,
    /// Start so many machines, in the background
    #[arg(long, value_name = "NUMBER", value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub count: Option<u32>,
    /// Run the machine in the background
    #[arg(long)]
    pub detach: bool,
    /// A port of this host that leads to one of the machine, as for `mercury hosted run`
    #[arg(long, value_name = "[udp:]PORT[:PORT]", conflicts_with = "count")]
    pub forward: Vec<Forward>,
}

/// The options of `mercury disco fork`.
#[derive(Debug, Args)]
pub struct ForkArgs {
    /// The machine that is copied
    pub machine: Name,
    /// The copy's name. With --count it is the beginning of the names [default: the machine's name and a
    /// number]
    #[arg(long)]
    pub name: Option<Name>,
    /// Start so many copies
    #[arg(long, value_name = "NUMBER", value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub count: Option<u32>,
    /// A port of this host that leads to one of the copy, as for `mercury hosted run`
    #[arg(long, value_name = "[udp:]PORT[:PORT]", conflicts_with = "count")]
    pub forward: Vec<Forward>,
}

/// The options of `mercury disco save`.
#[derive(Debug, Args)]
pub struct SaveArgs {
    /// The machine
    pub machine: Name,
    /// The new file
    pub file: PathBuf,
}

/// The options of `mercury disco resize`.
#[derive(Debug, Args)]
pub struct ResizeArgs {
    /// The machine
    pub machine: Name,
    /// The memory that it is to have, in MiB
    #[arg(value_name = "MIB", value_parser = clap::value_parser!(u64).range(1..=1 << 30))]
    pub memory: u64,
}

/// A machine's name.
#[derive(Debug, Args)]
pub struct MachineArgs {
    /// The machine
    pub machine: Name,
}

/// A template's name.
#[derive(Debug, Args)]
pub struct TemplateName {
    /// The template
    pub template: Name,
}
