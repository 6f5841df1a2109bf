//! [`Output`]: writes metrics one by one, with the prefix of their names.

use std::fmt;

use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use stolon::HistogramData;

/// Writes metrics one by one.
#[derive(Debug)]
pub(super) struct Output<'a> {
    encoder: DescriptorEncoder<'a>,
    /// The prefix of the names of all metrics.
    prefix: &'static str,
}

impl<'a> Output<'a> {
    pub(super) fn new(encoder: DescriptorEncoder<'a>, prefix: &'static str) -> Self {
        Self { encoder, prefix }
    }

    /// The same output with another prefix.
    pub(super) fn with_prefix(&mut self, prefix: &'static str) -> &mut Self {
        self.prefix = prefix;
        self
    }

    pub(super) fn counter(&mut self, name: &str, help: &str, value: u64) -> fmt::Result {
        self.one(name, help, &ConstCounter::new(value))
    }

    pub(super) fn gauge(&mut self, name: &str, help: &str, value: u64) -> fmt::Result {
        self.one(name, help, &ConstGauge::new(value))
    }

    pub(super) fn gauge_f64(&mut self, name: &str, help: &str, value: f64) -> fmt::Result {
        self.one(name, help, &ConstGauge::new(value))
    }

    fn one(&mut self, name: &str, help: &str, metric: &impl EncodeMetric) -> fmt::Result {
        let kind = metric.metric_type();
        let name = self.prefixed(name);
        let encoder = self.encoder.encode_descriptor(&name, help, None, kind)?;
        metric.encode(encoder)
    }

    /// A counter for each value of a label.
    pub(super) fn counters(
        &mut self,
        name: &str,
        help: &str,
        label: &str,
        values: &[(&str, u64)],
    ) -> fmt::Result {
        self.family(name, help, label, values, ConstCounter::new)
    }

    /// A gauge for each value of a label.
    pub(super) fn gauges(
        &mut self,
        name: &str,
        help: &str,
        label: &str,
        values: &[(&str, u64)],
    ) -> fmt::Result {
        self.family(name, help, label, values, ConstGauge::new)
    }

    fn family<M: EncodeMetric>(
        &mut self,
        name: &str,
        help: &str,
        label: &str,
        values: &[(&str, u64)],
        metric: fn(u64) -> M,
    ) -> fmt::Result {
        let name = self.prefixed(name);
        let kind = metric(0).metric_type();
        let mut family = self.encoder.encode_descriptor(&name, help, None, kind)?;
        values.iter().try_for_each(|&(value, count)| {
            metric(count).encode(family.encode_family(&[(label, value)])?)
        })
    }

    /// A gauge of value 1 whose labels carry the information.
    pub(super) fn info(
        &mut self,
        name: &str,
        help: &str,
        labels: &[(&str, String); 3],
        value: u64,
    ) -> fmt::Result {
        let name = self.prefixed(name);
        let mut family = self.encoder.encode_descriptor(&name, help, None, MetricType::Gauge)?;
        ConstGauge::new(value).encode(family.encode_family(labels)?)
    }

    /// A distribution, without the buckets above `most`, the largest possible value.
    pub(super) fn histogram(
        &mut self,
        name: &str,
        help: &str,
        data: &HistogramData,
        most: f64,
    ) -> fmt::Result {
        let name = self.prefixed(name);
        let kept = data.bounds.iter().take_while(|&&bound| bound <= most).count();
        let mut buckets: Vec<(f64, u64)> =
            data.bounds[..kept].iter().copied().zip(data.counts.iter().copied()).collect();
        buckets.push((f64::INFINITY, data.counts[kept..].iter().sum()));
        let mut encoder =
            self.encoder.encode_descriptor(&name, help, None, MetricType::Histogram)?;
        encoder.encode_histogram::<[(&str, &str); 0]>(data.sum, data.total(), &buckets, None)
    }

    fn prefixed(&self, name: &str) -> String {
        format!("{}{name}", self.prefix)
    }
}
