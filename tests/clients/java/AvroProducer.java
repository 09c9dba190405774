import io.confluent.kafka.serializers.KafkaAvroSerializer;
import java.util.List;
import java.util.Map;
import org.apache.avro.Schema;
import org.apache.avro.generic.GenericData;
import org.apache.avro.generic.GenericRecord;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.serialization.StringSerializer;

/**
 * A Java producer with Confluent's Avro serializer: two orders of one schema, and one of a later schema.
 *
 * Arguments: the bootstrap address, the registry's URL, the topic.
 */
public class AvroProducer {
    static final String WHO = "{\"type\":\"record\",\"name\":\"Who\",\"fields\":[{\"name\":\"name\",\"type\":\"string\"}]}";
    static final String FIELDS = "{\"name\":\"id\",\"type\":\"%s\"},"
        + "{\"name\":\"at\",\"type\":{\"type\":\"long\",\"logicalType\":\"timestamp-micros\"}},"
        + "{\"name\":\"tags\",\"type\":{\"type\":\"array\",\"items\":\"string\"}},"
        + "{\"name\":\"who\",\"type\":[\"null\"," + WHO + "],\"default\":null}";
    static final Schema FIRST = order(String.format(FIELDS, "int"));
    static final Schema SECOND = order(
        String.format(FIELDS, "long") + ",{\"name\":\"note\",\"type\":[\"null\",\"string\"],\"default\":null}");

    public static void main(String[] arguments) throws Exception {
        Map<String, Object> settings = Map.of(
            "bootstrap.servers", arguments[0],
            "schema.registry.url", arguments[1],
            "key.serializer", StringSerializer.class,
            "value.serializer", KafkaAvroSerializer.class);
        try (KafkaProducer<String, Object> producer = new KafkaProducer<>(settings)) {
            long at = 1_767_323_045_000_001L;
            GenericRecord last = order(SECOND, 1L << 40, at, List.of(), null);
            last.put("note", "größer");
            for (GenericRecord order : List.of(
                order(FIRST, 1, at, List.of("a", "b"), "Ada"), order(FIRST, 2, at + 1, List.of(), null), last)) {
                producer.send(new ProducerRecord<>(arguments[2], 0, "k", order)).get();
            }
        }
    }

    static Schema order(String fields) {
        return new Schema.Parser().parse(
            "{\"type\":\"record\",\"name\":\"Order\",\"namespace\":\"shop\",\"fields\":[" + fields + "]}");
    }

    static GenericRecord order(Schema schema, Object id, long at, List<String> tags, String name) {
        GenericRecord order = new GenericData.Record(schema);
        order.put("id", id);
        order.put("at", at);
        order.put("tags", tags);
        if (name != null) {
            GenericRecord who = new GenericData.Record(schema.getField("who").schema().getTypes().get(1));
            who.put("name", name);
            order.put("who", who);
        }
        return order;
    }
}
