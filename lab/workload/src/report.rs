//! The line with which a workload ends.

use serde_json::{Map, Value, json};

/// The number of violations that are shown. Further ones are only counted.
const SHOWN: usize = 10;

/// The findings of a workload.
#[derive(Debug, Default)]
pub struct Report {
    passes: u64,
    violations: u64,
    shown: Vec<String>,
    facts: Map<String, Value>,
}

impl Report {
    /// Adds the findings of one thread.
    pub fn merge(&mut self, other: Self) {
        self.passes += other.passes;
        self.violations += other.violations;
        let room = SHOWN.saturating_sub(self.shown.len());
        self.shown.extend(other.shown.into_iter().take(room));
        self.facts.extend(other.facts);
    }

    /// Counts one more round, with or without a violation.
    pub fn pass(&mut self) {
        self.passes += 1;
    }

    /// Returns the number of rounds.
    pub fn passes(&self) -> u64 {
        self.passes
    }

    /// Adds a violation.
    pub fn violation(&mut self, what: impl Into<String>) {
        self.violations += 1;
        if self.shown.len() < SHOWN {
            self.shown.push(what.into());
        }
    }

    /// Adds a violation unless `holds`.
    pub fn check(&mut self, holds: bool, what: impl FnOnce() -> String) {
        if !holds {
            self.violation(what());
        }
    }

    /// Adds a result for the line's reader.
    pub fn fact(&mut self, name: &str, value: impl Into<Value>) {
        self.facts.insert(name.to_owned(), value.into());
    }

    /// Returns true if nothing was violated.
    pub fn is_clean(&self) -> bool {
        self.violations == 0
    }

    /// Returns the report as JSON in one line.
    pub fn line(&self) -> String {
        let mut line = json!({ "passes": self.passes, "violations": self.violations });
        if let Value::Object(fields) = &mut line {
            if !self.shown.is_empty() {
                fields.insert("seen".to_owned(), json!(self.shown));
            }
            fields.extend(self.facts.clone());
        }
        line.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_violations_are_counted_and_few_shown() {
        let mut report = Report::default();
        for number in 0..25 {
            let mut part = Report::default();
            part.pass();
            part.violation(format!("number {number}"));
            report.merge(part);
        }
        report.fact("answer", 42);
        assert!(!report.is_clean());
        let line = report.line();
        assert!(line.contains("\"violations\":25") && line.contains("\"passes\":25"), "{line}");
        assert!(line.contains("number 9") && !line.contains("number 10"), "{line}");
        assert!(line.contains("\"answer\":42"), "{line}");
    }
}
