//! The command line of `afterburner`.

use std::{ffi::OsString, path::PathBuf};

use clap::{Parser, Subcommand};

/// The whole command line.
#[derive(Debug, Parser)]
#[command(
    name = "afterburner",
    version,
    about = "Makes a Linux kernel pre-virtualized while it is built",
    long_about = "Makes a Linux kernel pre-virtualized while it is built, without a change of its source: \
                  each instruction that a virtual machine's monitor must replace gets room for a jump, and \
                  is recorded in a section of the kernel. Called by the name `as`, \
                  it stands in for the assembler.",
    after_help = TABLE
)]
pub struct Cli {
    /// Subcommand to execute.
    #[command(subcommand)]
    pub command: Command,
}

/// The exit statuses, as help texts print them.
pub const TABLE: &str = "\
Exit status:
  0    done; verify: every sensitive instruction is accounted for
  1    failed; verify, and make after the build: an instruction is not
  2    wrong usage
  of make and of the assembler otherwise: theirs";

/// The subcommands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Run a kernel's `make` with the afterburner in place of the assembler
    ///
    /// All arguments after `make` are handed on. To do the same by hand, make a directory with a
    /// link `as` to this program, and run `make CC="gcc -BDIRECTORY/"`.
    Make {
        /// Make's own arguments, in the kernel's source: -j4 O=../build bzImage modules
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<OsString>,
    },
    /// Disassemble a kernel and its modules, and account for every sensitive instruction
    Verify {
        /// The vmlinux of the build, and modules (*.ko)
        #[arg(required = true)]
        files: Vec<PathBuf>,
        /// Print one JSON object, for programs
        #[arg(long)]
        json: bool,
    },
    /// List the slots of a kernel or a module
    List {
        /// The vmlinux of the build, or a module
        file: PathBuf,
        /// Print one JSON object a line, for programs
        #[arg(long)]
        json: bool,
    },
    /// Write manual pages or shell completions
    #[command(hide = true)]
    Generate {
        /// Kind of files to write
        what: Generated,
        /// Directory to write to
        directory: PathBuf,
    },
}

/// The kinds of files that are made from the definition of the command line.
#[derive(Clone, Copy, Debug, clap::ValueEnum)]
pub enum Generated {
    /// Manual pages in section 1.
    Man,
    /// Completions for bash, zsh and fish.
    Completions,
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_definition_is_sound() {
        Cli::command().debug_assert();
    }

    #[test]
    fn makes_arguments_are_handed_on() {
        let cli = Cli::parse_from(["afterburner", "make", "-j2", "O=x", "--", "vmlinux"]);
        let Command::Make { arguments } = cli.command else { panic!("{cli:?}") };
        assert_eq!(arguments[..2], ["-j2", "O=x"].map(OsString::from));
    }
}
