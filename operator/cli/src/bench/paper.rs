//! Figures of the two papers on Mercury, in microseconds, for printing beside those of this
//! machine.
//!
//! * CLUSTER 2007: one 3.0 GHz Pentium 4, 1 GB, Linux 2.6.16, Xen 3.0.2. Its table 1 has lmbench on
//!   one processor, its table 2 five mode switches.
//! * JCST 2012: two 3.0 GHz Xeons, 2 GB, the same Linux and Xen. Its table 1 has lmbench on one
//!   processor, its table 2 on two; the mean times of mode switches are in its section 7.4.

use serde::Serialize;

/// The times of mode switches, in microseconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Switches {
    /// Time from native to virtual mode.
    pub attach_us: f64,
    /// Time from virtual to native mode.
    pub detach_us: f64,
}

/// CLUSTER 2007, table 2: the printed means. The mean of the five listed attaches is 210.324.
pub const CLUSTER_2007: Switches = Switches { attach_us: 210.234, detach_us: 59.758 };
/// JCST 2012, section 7.4.
pub const JCST_2012: Switches = Switches { attach_us: 220.0, detach_us: 60.0 };

/// One row of an lmbench table, in microseconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Row {
    /// Native Linux (N-L).
    pub native_us: f64,
    /// Linux above the papers' Mercury in native mode (M-N).
    pub mercury_native_us: f64,
    /// Xen-Linux in domain 0.
    pub xen_domain_0_us: f64,
    /// Linux above the papers' Mercury in virtual mode (M-V).
    pub mercury_attached_us: f64,
    /// Xen-Linux in domain U (X-U).
    pub xen_domain_u_us: f64,
    /// Xen-Linux in a domain U that a self-virtualized Linux hosts (M-U).
    pub mercury_domain_u_us: f64,
}

/// One benchmark in the three tables.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Figures {
    /// CLUSTER 2007, table 1.
    pub cluster_2007: Row,
    /// JCST 2012, table 1: one processor.
    pub jcst_2012_up: Row,
    /// JCST 2012, table 2: two processors.
    pub jcst_2012_smp: Row,
}

/// A row as the tables print it: N-L, M-N, X-0, M-V, X-U, M-U.
const fn row(us: &[f64; 6]) -> Row {
    Row {
        native_us: us[0],
        mercury_native_us: us[1],
        xen_domain_0_us: us[2],
        mercury_attached_us: us[3],
        xen_domain_u_us: us[4],
        mercury_domain_u_us: us[5],
    }
}

/// The figures of an operation: CLUSTER 2007, JCST 2012 on one processor, and on two.
type Operation = (&'static str, [[f64; 6]; 3]);

/// Operations of both papers, by the names of `mercury bench os`.
const TABLE: [Operation; 9] = [
    (
        "fork",
        [
            [93.0, 113.0, 323.0, 323.0, 311.0, 311.0],
            [98.0, 114.0, 482.0, 490.0, 470.0, 471.0],
            [128.0, 148.0, 509.0, 523.0, 501.0, 501.0],
        ],
    ),
    (
        "exec",
        [
            [340.0, 392.0, 858.0, 846.0, 830.0, 831.0],
            [372.0, 404.0, 1233.0, 1232.0, 1211.0, 1220.0],
            [449.0, 501.0, 1353.0, 1386.0, 1335.0, 1349.0],
        ],
    ),
    (
        "sh",
        [
            [1089.0, 1220.0, 2174.0, 2158.0, 2080.0, 2082.0],
            [1203.0, 1337.0, 2977.0, 2996.0, 2936.0, 2931.0],
            [1444.0, 1585.0, 3359.0, 3435.0, 3222.0, 3319.0],
        ],
    ),
    (
        "ctx-2p-0k",
        [
            [1.59, 2.49, 3.63, 4.04, 3.53, 3.51],
            [1.64, 2.49, 5.10, 5.41, 5.04, 5.06],
            [2.31, 3.07, 5.16, 5.61, 5.11, 5.14],
        ],
    ),
    (
        "ctx-16p-16k",
        [
            [2.29, 3.56, 4.38, 5.30, 4.24, 4.36],
            [2.73, 3.91, 6.76, 7.28, 6.54, 6.45],
            [2.91, 4.15, 7.16, 7.27, 6.83, 7.02],
        ],
    ),
    (
        "ctx-16p-64k",
        [
            [3.52, 6.90, 7.14, 8.78, 6.71, 6.94],
            [10.30, 12.77, 15.73, 16.27, 15.77, 15.97],
            [11.03, 12.40, 16.17, 16.77, 16.10, 16.60],
        ],
    ),
    (
        "mmap",
        [
            [3380.0, 3644.0, 7778.0, 7439.0, 8406.0, 8152.0],
            [3724.0, 3995.0, 10_579.0, 11_800.0, 10_867.0, 11_067.0],
            [5449.0, 5731.0, 12_200.0, 13_000.0, 12_433.0, 12_533.0],
        ],
    ),
    (
        "protection-fault",
        [
            [0.55, 0.61, 0.92, 1.01, 0.97, 0.98],
            [0.61, 0.63, 0.97, 1.17, 1.04, 1.11],
            [0.70, 0.74, 1.13, 1.20, 1.15, 1.18],
        ],
    ),
    (
        "page-fault",
        [
            [1.19, 1.48, 2.64, 2.66, 2.59, 2.57],
            [1.22, 1.48, 3.09, 3.18, 3.03, 3.10],
            [1.64, 1.89, 3.45, 3.67, 3.39, 3.46],
        ],
    ),
];

/// Returns the figures of an operation, if the papers have it.
#[must_use]
pub fn figures(name: &str) -> Option<Figures> {
    let (_, [cluster_2007, jcst_2012_up, jcst_2012_smp]) = TABLE.iter().find(|(one, _)| *one == name)?;
    Some(Figures {
        cluster_2007: row(cluster_2007),
        jcst_2012_up: row(jcst_2012_up),
        jcst_2012_smp: row(jcst_2012_smp),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Losses that the papers state as percentages in their text hold for the figures of the tables
    /// here.
    #[test]
    fn figures_are_those_of_the_papers() {
        let loss = |row: Row| 1.0 - row.native_us / row.xen_domain_0_us;
        let [mmap, fork] = ["mmap", "fork"].map(|name| figures(name).expect("an operation of the papers"));
        // CLUSTER 2007, section 5.2: mmap loses 57 % in domain 0.
        assert!((loss(mmap.cluster_2007) - 0.57).abs() < 0.01);
        // JCST 2012, section 7.2: mmap loses 65 % on one processor and 55 % on two, fork 80 % and 75 %.
        assert!((loss(mmap.jcst_2012_up) - 0.65).abs() < 0.01);
        assert!((loss(mmap.jcst_2012_smp) - 0.55).abs() < 0.01);
        assert!((loss(fork.jcst_2012_up) - 0.80).abs() < 0.01);
        assert!((loss(fork.jcst_2012_smp) - 0.75).abs() < 0.01);
        // CLUSTER 2007, table 2, in nanoseconds.
        let mean = |ns: [f64; 5]| ns.iter().sum::<f64>() / 5e3;
        assert!((mean([199_800.0, 202_545.0, 206_192.0, 209_814.0, 233_268.0]) - 210.324).abs() < 0.001);
        let detach = mean([59_517.0, 60_398.0, 62_630.0, 56_302.0, 59_943.0]);
        assert!((detach - CLUSTER_2007.detach_us).abs() < 0.001);
    }
}
