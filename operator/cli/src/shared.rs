//! Options that several commands have.

use clap::Args;
use mercury_control::cpus::CpuSet;
use std::path::PathBuf;

#[derive(Clone, Debug, Default, Args)]
pub struct ModuleArgs {
    /// Load the driver from this file instead of by modprobe
    #[arg(long, env = "MERCURY_MODULE", value_name = "FILE")]
    pub module: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, Args)]
pub struct LevelArgs {
    /// Level of compression, one of zstd's
    #[arg(
        long,
        default_value_t = 1,
        value_parser = clap::value_parser!(i32).range(-7..=19),
        allow_hyphen_values = true
    )]
    pub level: i32,
}

#[derive(Debug, Args)]
pub struct CpusArgs {
    /// Only these CPUs, such as 0-3,8 [default: all online CPUs]
    #[arg(long, value_name = "LIST")]
    pub cpus: Option<CpuSet>,
}

/// The option of commands that connect to a destination.
#[derive(Clone, Debug, Args)]
pub struct TokenArg {
    /// Pairing token that `mercury receive` has printed; - reads it from standard input, where `ps`
    /// does not show it
    #[arg(
        long,
        env = "MERCURY_KEY",
        hide_env_values = true,
        value_name = "TOKEN",
        allow_hyphen_values = true
    )]
    pub key: Option<String>,
}
