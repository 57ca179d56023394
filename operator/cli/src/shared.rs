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

#[derive(Debug, Args)]
pub struct CpusArgs {
    /// Only these CPUs, such as 0-3,8 [default: all online CPUs]
    #[arg(long, value_name = "LIST")]
    pub cpus: Option<CpuSet>,
}
