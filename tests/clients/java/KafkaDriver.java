import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.ArrayList;
import java.util.Base64;
import java.util.Iterator;
import java.util.List;
import java.util.Map;
import java.util.Properties;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.concurrent.Future;
import java.util.concurrent.TimeUnit;
import org.apache.kafka.clients.admin.Admin;
import org.apache.kafka.clients.admin.AlterConfigOp;
import org.apache.kafka.clients.admin.ConfigEntry;
import org.apache.kafka.clients.admin.ConsumerGroupDescription;
import org.apache.kafka.clients.admin.NewPartitions;
import org.apache.kafka.clients.admin.NewTopic;
import org.apache.kafka.clients.admin.OffsetSpec;
import org.apache.kafka.clients.admin.RecordsToDelete;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.ConsumerRecords;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.consumer.OffsetAndTimestamp;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.clients.producer.RecordMetadata;
import org.apache.kafka.common.KafkaException;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.config.ConfigResource;
import org.apache.kafka.common.header.Header;
import org.apache.kafka.common.protocol.Errors;
import org.apache.kafka.common.serialization.ByteArrayDeserializer;
import org.apache.kafka.common.serialization.ByteArraySerializer;

/**
 * Java's kafka-clients, driven by a test over standard input and output, so that one JVM serves all tests.
 *
 * A request is one line: id, verb, arguments, separated by tabs. A response is one line: the id, "ok" and values, or
 * "error", Kafka's error code and a text. Each field after the id and the verb is "=" and Base64, or "-" for null. A record's
 * fields are partition, offset, timestamp, key, value, number of headers, and each header's name and value. A list is its
 * length and its items; settings are a list of names and values. Requests run side by side; a consumer has one at a time.
 */
public final class KafkaDriver {
    private static final long ANSWER_WITHIN_MS = 20_000;
    private static final PrintStream OUT = System.out;
    private static final Map<String, KafkaConsumer<byte[], byte[]>> MEMBERS = new ConcurrentHashMap<>();
    private static final Map<String, KafkaProducer<byte[], byte[]>> PRODUCERS = new ConcurrentHashMap<>();
    private static final Map<String, Admin> ADMINS = new ConcurrentHashMap<>();

    public static void main(String[] arguments) throws Exception {
        ExecutorService workers = Executors.newCachedThreadPool();
        BufferedReader requests = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.US_ASCII));
        for (String line = requests.readLine(); line != null; line = requests.readLine()) {
            String request = line;
            workers.execute(() -> answer(request));
        }
        System.exit(0);
    }

    private static void answer(String line) {
        String[] parts = line.split("\t");
        Values response = new Values();
        try {
            handle(parts[1], new Arguments(parts), response);
            print(parts[0], "ok", response);
        } catch (Throwable failure) {
            Throwable cause = failure instanceof ExecutionException ? failure.getCause() : failure;
            Values error = new Values();
            error.add(cause instanceof KafkaException ? Errors.forException(cause).code() : -1);
            error.add(cause.toString());
            print(parts[0], "error", error);
        }
    }

    private static void print(String id, String status, Values values) {
        synchronized (OUT) {
            OUT.println(id + "\t" + status + values.line);
            OUT.flush();
        }
    }

    private static void handle(String verb, Arguments in, Values out) throws Exception {
        switch (verb) {
            case "version" -> out.add(org.apache.kafka.common.utils.AppInfoParser.getVersion());
            case "produce" -> produce(in);
            case "transact" -> transact(in);
            case "producer-new" -> PRODUCERS.put(
                in.text(), new KafkaProducer<>(in.settings(), new ByteArraySerializer(), new ByteArraySerializer()));
            case "producer-open" -> PRODUCERS.get(in.text()).initTransactions();
            case "producer-begin" -> PRODUCERS.get(in.text()).beginTransaction();
            case "producer-send" -> producerSend(in, out);
            case "producer-commit" -> PRODUCERS.get(in.text()).commitTransaction();
            case "producer-abort" -> PRODUCERS.get(in.text()).abortTransaction();
            case "producer-close" -> PRODUCERS.remove(in.text()).close(Duration.ZERO);
            case "read" -> read(in, out);
            case "offset-at" -> offsetAt(in, out);
            case "member-open" -> memberOpen(in);
            case "member-step" -> memberStep(in, out);
            case "member-close" -> MEMBERS.remove(in.text()).close();
            default -> administer(verb, in, out);
        }
    }

    private static void produce(Arguments in) throws Exception {
        Properties settings = in.settings();
        String topic = in.text();
        try (KafkaProducer<byte[], byte[]> producer =
                new KafkaProducer<>(settings, new ByteArraySerializer(), new ByteArraySerializer())) {
            List<Future<RecordMetadata>> sent = new ArrayList<>();
            for (int left = in.number(); left > 0; left--) {
                int partition = in.number();
                in.text();
                String timestamp = in.text();
                ProducerRecord<byte[], byte[]> record = new ProducerRecord<>(
                    topic, partition, timestamp == null ? null : Long.valueOf(timestamp), in.bytes(), in.bytes());
                for (int headers = in.number(); headers > 0; headers--) {
                    record.headers().add(in.text(), in.bytes());
                }
                sent.add(producer.send(record));
            }
            for (Future<RecordMetadata> one : sent) {
                one.get(ANSWER_WITHIN_MS, TimeUnit.MILLISECONDS);
            }
        }
    }

    /** Sends each transaction's records with one producer, and ends it as its first argument tells. */
    private static void transact(Arguments in) {
        Properties settings = in.settings();
        String topic = in.text();
        try (KafkaProducer<byte[], byte[]> producer =
                new KafkaProducer<>(settings, new ByteArraySerializer(), new ByteArraySerializer())) {
            producer.initTransactions();
            for (int left = in.number(); left > 0; left--) {
                boolean commits = in.text().equals("commit");
                producer.beginTransaction();
                for (int records = in.number(); records > 0; records--) {
                    producer.send(new ProducerRecord<>(topic, in.number(), in.bytes(), in.bytes()));
                }
                producer.flush();
                if (commits) {
                    producer.commitTransaction();
                } else {
                    producer.abortTransaction();
                }
            }
        }
    }

    /** Sends records inside a transaction; the response has an offset, or -1 and the error, for each. */
    private static void producerSend(Arguments in, Values out) throws InterruptedException {
        KafkaProducer<byte[], byte[]> producer = PRODUCERS.get(in.text());
        List<Future<RecordMetadata>> sent = new ArrayList<>();
        List<String> refused = new ArrayList<>();
        for (int left = in.number(); left > 0; left--) {
            try {
                sent.add(producer.send(new ProducerRecord<>(in.text(), in.number(), null, in.bytes())));
                refused.add("");
            } catch (KafkaException | IllegalStateException failure) {
                sent.add(null);
                refused.add(failure.toString());
            }
        }
        for (int index = 0; index < sent.size(); index++) {
            try {
                out.add(sent.get(index) == null ? "-1" : Long.toString(sent.get(index).get().offset()));
                out.add(refused.get(index));
            } catch (ExecutionException failure) {
                out.add("-1");
                out.add(failure.getCause().toString());
            }
        }
    }

    private static void read(Arguments in, Values out) {
        try (KafkaConsumer<byte[], byte[]> consumer = consumer(in.settings())) {
            String topic = in.text();
            int count = in.number();
            List<TopicPartition> partitions = new ArrayList<>();
            for (int left = in.number(); left > 0; left--) {
                partitions.add(new TopicPartition(topic, in.number()));
            }
            consumer.assign(partitions);
            consumer.seekToBeginning(partitions);
            List<ConsumerRecord<byte[], byte[]>> got = new ArrayList<>();
            long deadline = System.currentTimeMillis() + ANSWER_WITHIN_MS;
            while (got.size() < count && System.currentTimeMillis() < deadline) {
                consumer.poll(Duration.ofMillis(200)).forEach(got::add);
            }
            out.records(got);
        }
    }

    private static void offsetAt(Arguments in, Values out) {
        try (KafkaConsumer<byte[], byte[]> consumer = consumer(in.settings())) {
            TopicPartition partition = new TopicPartition(in.text(), 0);
            OffsetAndTimestamp found =
                consumer.offsetsForTimes(Map.of(partition, Long.valueOf(in.text()))).get(partition);
            out.add(found == null ? null : Long.toString(found.offset()));
        }
    }

    private static void memberOpen(Arguments in) {
        String id = in.text();
        KafkaConsumer<byte[], byte[]> consumer = consumer(in.settings());
        consumer.subscribe(List.of(in.text()));
        MEMBERS.put(id, consumer);
    }

    /** One poll and the commit of what it gave; what could not be committed is not returned. */
    private static void memberStep(Arguments in, Values out) {
        KafkaConsumer<byte[], byte[]> consumer = MEMBERS.get(in.text());
        List<ConsumerRecord<byte[], byte[]>> got = new ArrayList<>();
        ConsumerRecords<byte[], byte[]> polled = consumer.poll(Duration.ofMillis(100));
        if (!polled.isEmpty()) {
            try {
                consumer.commitSync();
                polled.forEach(got::add);
            } catch (KafkaException lost) {
                got.clear();
            }
        }
        List<String> owned = new ArrayList<>();
        consumer.assignment().forEach(partition -> owned.add(Integer.toString(partition.partition())));
        out.list(owned);
        out.records(got);
    }

    private static KafkaConsumer<byte[], byte[]> consumer(Properties settings) {
        return new KafkaConsumer<>(settings, new ByteArrayDeserializer(), new ByteArrayDeserializer());
    }

    @SuppressWarnings({"deprecation", "removal"}) // the successors are missing from the 3.9 client
    private static void administer(String verb, Arguments in, Values out) throws Exception {
        String bootstrap = in.text();
        Admin admin = ADMINS.computeIfAbsent(bootstrap, address -> Admin.create(Map.of("bootstrap.servers", address)));
        String name = in.text();
        TopicPartition first = new TopicPartition(name == null ? "" : name, 0);
        ConfigResource resource = new ConfigResource(ConfigResource.Type.TOPIC, name == null ? "" : name);
        switch (verb) {
            case "create-topic" -> {
                NewTopic topic = new NewTopic(name, in.number(), (short) 1);
                Properties configs = in.settings();
                Map<String, String> values = new ConcurrentHashMap<>();
                configs.stringPropertyNames().forEach(config -> values.put(config, configs.getProperty(config)));
                admin.createTopics(List.of(topic.configs(values))).all().get();
            }
            case "delete-topic" -> admin.deleteTopics(List.of(name)).all().get();
            case "topics" -> out.list(admin.listTopics().names().get());
            case "partition-count" ->
                out.add(admin.describeTopics(List.of(name)).allTopicNames().get().get(name).partitions().size());
            case "create-partitions" ->
                admin.createPartitions(Map.of(name, NewPartitions.increaseTo(in.number()))).all().get();
            case "configs" -> {
                List<String> pairs = new ArrayList<>();
                for (ConfigEntry entry : admin.describeConfigs(List.of(resource)).all().get().get(resource).entries()) {
                    pairs.add(entry.name());
                    pairs.add(entry.value());
                }
                out.list(pairs);
            }
            case "set-config" -> admin.incrementalAlterConfigs(Map.of(resource, List.of(
                new AlterConfigOp(new ConfigEntry(in.text(), in.text()), AlterConfigOp.OpType.SET)))).all().get();
            case "delete-records" -> out.add(Long.toString(admin.deleteRecords(
                Map.of(first, RecordsToDelete.beforeOffset(in.number()))).lowWatermarks().get(first).get().lowWatermark()));
            case "groups" -> {
                List<String> groups = new ArrayList<>();
                admin.listConsumerGroups().all().get().forEach(group -> groups.add(group.groupId()));
                out.list(groups);
            }
            case "describe-group" -> {
                ConsumerGroupDescription group = admin.describeConsumerGroups(List.of(name)).all().get().get(name);
                out.add(group.state().toString());
                out.add(group.members().size());
            }
            case "committed" -> {
                List<String> offsets = new ArrayList<>();
                admin.listConsumerGroupOffsets(name).partitionsToOffsetAndMetadata().get().forEach((partition, at) -> {
                    offsets.add(partition.topic());
                    offsets.add(Integer.toString(partition.partition()));
                    offsets.add(Long.toString(at.offset()));
                });
                out.list(offsets);
            }
            case "delete-group" -> admin.deleteConsumerGroups(List.of(name)).all().get();
            case "list-offset" -> {
                OffsetSpec spec = switch (in.text()) {
                    case "earliest" -> OffsetSpec.earliest();
                    case "latest" -> OffsetSpec.latest();
                    default -> OffsetSpec.maxTimestamp();
                };
                out.add(Long.toString(admin.listOffsets(Map.of(first, spec)).partitionResult(first).get().offset()));
            }
            default -> throw new IllegalArgumentException("unknown verb " + verb);
        }
    }

    /** The fields of a request, read in order. */
    private static final class Arguments {
        private final String[] parts;
        private int at = 2;

        Arguments(String[] parts) {
            this.parts = parts;
        }

        byte[] bytes() {
            String part = parts[at++];
            return part.equals("-") ? null : Base64.getDecoder().decode(part.substring(1));
        }

        String text() {
            byte[] bytes = bytes();
            return bytes == null ? null : new String(bytes, StandardCharsets.UTF_8);
        }

        int number() {
            return Integer.parseInt(text());
        }

        Properties settings() {
            Properties settings = new Properties();
            for (int left = number(); left > 0; left -= 2) {
                settings.setProperty(text(), text());
            }
            return settings;
        }
    }

    /** The fields of a response. */
    private static final class Values {
        private final StringBuilder line = new StringBuilder();

        void add(byte[] value) {
            line.append('\t').append(value == null ? "-" : "=" + Base64.getEncoder().encodeToString(value));
        }

        void add(String value) {
            add(value == null ? null : value.getBytes(StandardCharsets.UTF_8));
        }

        void add(int value) {
            add(Integer.toString(value));
        }

        void list(Iterable<String> items) {
            List<String> all = new ArrayList<>();
            items.forEach(all::add);
            add(all.size());
            all.forEach(this::add);
        }

        void records(List<ConsumerRecord<byte[], byte[]>> records) {
            add(records.size());
            for (ConsumerRecord<byte[], byte[]> record : records) {
                add(record.partition());
                add(Long.toString(record.offset()));
                add(Long.toString(record.timestamp()));
                add(record.key());
                add(record.value());
                Iterator<Header> headers = record.headers().iterator();
                add(record.headers().toArray().length);
                while (headers.hasNext()) {
                    Header header = headers.next();
                    add(header.key());
                    add(header.value());
                }
            }
        }
    }
}
