//! The figures of the paper (Self-Virtualization for HPC clusters, tables 1 and 2 and section 7.4), in
//! microseconds, for printing beside ours.

use serde::Serialize;

/// Native to virtual mode, section 7.4.
pub const ATTACH_US: f64 = 220.0;

/// Virtual to native mode, section 7.4.
pub const DETACH_US: f64 = 60.0;

/// One row of the paper's lmbench tables.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Row {
    /// Native Linux, one processor (table 1, N-L).
    pub native_up_us: f64,
    /// The paper's Mercury in native mode, one processor (M-N).
    pub mercury_native_up_us: f64,
    /// The paper's Mercury in partial-virtual mode, one processor (M-V).
    pub mercury_attached_up_us: f64,
    /// Native Linux, several processors (table 2, N-L).
    pub native_smp_us: f64,
    /// Mercury native, several processors (M-N).
    pub mercury_native_smp_us: f64,
    /// Mercury partial-virtual, several processors (M-V).
    pub mercury_attached_smp_us: f64,
}

const fn row(up: [f64; 3], smp: [f64; 3]) -> Row {
    Row {
        native_up_us: up[0],
        mercury_native_up_us: up[1],
        mercury_attached_up_us: up[2],
        native_smp_us: smp[0],
        mercury_native_smp_us: smp[1],
        mercury_attached_smp_us: smp[2],
    }
}

/// Fork Process.
pub const FORK: Row = row([98.0, 114.0, 490.0], [128.0, 148.0, 523.0]);
/// Exec Process.
pub const EXEC: Row = row([372.0, 404.0, 1232.0], [449.0, 501.0, 1386.0]);
/// Sh Process.
pub const SH: Row = row([1203.0, 1337.0, 2996.0], [1444.0, 1585.0, 3435.0]);
/// Ctx (2p/0k).
pub const CTX_2P_0K: Row = row([1.64, 2.49, 5.41], [2.31, 3.07, 5.61]);
/// Ctx (16p/16k).
pub const CTX_16P_16K: Row = row([2.73, 3.91, 7.28], [2.91, 4.15, 7.27]);
/// Ctx (16p/64k).
pub const CTX_16P_64K: Row = row([10.30, 12.77, 16.27], [11.03, 12.40, 16.77]);
/// Mmap LT.
pub const MMAP: Row = row([3724.0, 3995.0, 11800.0], [5449.0, 5731.0, 13000.0]);
/// Prot Fault.
pub const PROTECTION_FAULT: Row = row([0.61, 0.63, 1.17], [0.70, 0.74, 1.20]);
/// Page Fault.
pub const PAGE_FAULT: Row = row([1.22, 1.48, 3.18], [1.64, 1.89, 3.67]);
