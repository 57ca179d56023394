//! The host's words on the kernel's command line, in the form `lab.KEY=VALUE`.

use std::fs;

#[derive(Debug, Default)]
pub struct Cmdline(String);

impl Cmdline {
    /// Reads the running kernel's command line. It is empty if `/proc` is not mounted.
    pub fn read() -> Self {
        Self(fs::read_to_string("/proc/cmdline").unwrap_or_default())
    }

    /// Returns the value of `lab.KEY`, the last one if there are several.
    pub fn get(&self, key: &str) -> Option<&str> {
        self.0
            .split_whitespace()
            .rev()
            .find_map(|word| word.strip_prefix("lab.")?.strip_prefix(key)?.strip_prefix('='))
    }

    /// Returns true if the command line has a word of the kernel's own.
    pub fn has(&self, word: &str) -> bool {
        self.0.split_whitespace().any(|found| found == word)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_value_of_a_key_counts() {
        let line = Cmdline("quiet lab.init=agent lab.init=systemd lab.initial=x init=y".into());
        assert_eq!(line.get("init"), Some("systemd"));
        assert_eq!(line.get("initial"), Some("x"));
        assert_eq!(line.get("shell"), None);
        assert!(line.has("quiet") && !line.has("init"));
    }
}
