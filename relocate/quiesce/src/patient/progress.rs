//! The progress of a disk that has an unknown amount of data to write.

use mercury_control::sysroot::Sysroot;
use std::time::Duration;

/// Fields of a disk's statistics that count finished requests: reads, writes, discards and flushes. The times
/// beside them grow while a request waits, too.
const FINISHED: [usize; 4] = [0, 4, 11, 15];

/// A disk that is watched for requests that it finishes.
#[derive(Debug)]
pub struct Progress {
    /// Path of the disk's statistics.
    statistics: String,
    finished: Option<Vec<String>>,
    /// Time at which the disk finished the last request.
    since: Duration,
}

impl Progress {
    /// Watches a block device, by its number.
    #[must_use]
    pub fn of(device: u64) -> Self {
        let statistics = format!("sys/dev/block/{}:{}/stat", libc::major(device), libc::minor(device));
        Self { statistics, finished: None, since: Duration::ZERO }
    }

    /// Returns false if the disk has finished no request for `patience`. `elapsed` is the time for which it
    /// is watched.
    pub fn goes_on(&mut self, elapsed: Duration, patience: Duration, sysroot: &Sysroot) -> bool {
        let finished = sysroot.text(&self.statistics).map(|text| finished(&text));
        if finished != self.finished {
            (self.finished, self.since) = (finished, elapsed);
        }
        elapsed < self.since + patience
    }
}

fn finished(statistics: &str) -> Vec<String> {
    let fields: Vec<_> = statistics.split_whitespace().collect();
    FINISHED.iter().filter_map(|at| fields.get(*at)).map(ToString::to_string).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// While a request waits, the times in the statistics grow.
    #[test]
    fn a_disk_whose_requests_wait_makes_no_progress() {
        let root = tempfile::tempdir().expect("a folder");
        let folder = root.path().join("sys/dev/block/43:0");
        std::fs::create_dir_all(&folder).expect("a folder");
        let sysroot = Sysroot::at(root.path());
        let put = |text: &str| std::fs::write(folder.join("stat"), text).expect("a file");
        let mut disk = Progress::of(libc::makedev(43, 0));
        let mut goes_on =
            |seconds| disk.goes_on(Duration::from_secs(seconds), Duration::from_secs(30), &sysroot);
        put("7 0 56 3 20 5 160 9 0 12 12 0 0 0 0 2 1\n");
        assert!(goes_on(0) && goes_on(29));
        put("7 0 56 3 20 5 160 9 4 31012 40012 0 0 0 0 2 1\n");
        assert!(!goes_on(31), "four requests wait");
        for other in ["8 0 64 4 20", "8 0 64 4 21", "8 0 64 4 21 5 160 9 4 31012 40012 1"] {
            put(other);
            assert!(goes_on(100), "{other}");
        }
        put("7 0 56 3 20 5 160 9 0 12 12 0 0 0 0 3 1\n");
        assert!(goes_on(200) && !goes_on(230));
        let mut missing = Progress::of(libc::makedev(1, 1));
        assert!(missing.goes_on(Duration::from_secs(1), Duration::from_secs(30), &sysroot));
        assert!(!missing.goes_on(Duration::from_secs(30), Duration::from_secs(30), &sysroot));
    }
}
